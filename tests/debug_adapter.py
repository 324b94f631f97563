"""A client of debugpy, like an editor: it debugs a program and the processes that the program starts.

The protocol is documented at https://microsoft.github.io/debug-adapter-protocol/. The client implements enough of it to
set a breakpoint and continue from it. debugpy announces a new process with an event of its own, `debugpyAttach`, whose
body is the request to send on a second connection.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.waiting import until

TIMEOUT = 60.0
"""Seconds for a stop."""


class Stop(NamedTuple):
    """A process that is held at the breakpoint."""

    pid: int
    session: _Session
    thread: int

    def go_on(self) -> None:
        self.session.request("continue", threadId=self.thread)


class Editor:
    """Attaches to the program that waits at a port, and to what it starts; each process stops at the breakpoint.

    Args:
        port: of `python -m debugpy --listen PORT --wait-for-client`.
        program, line: where the breakpoint is.
    """

    def __init__(self, port: int, program: Path, line: int) -> None:
        self.breakpoint = {"source": {"path": str(program)}, "breakpoints": [{"line": line}]}
        self.changed = threading.Condition()
        self.attached: list[str] = []
        """Names of the processes that the program has started, as debugpy tells them."""
        self.stops: list[Stop] = []
        """Those that no test has taken."""
        self._sessions: list[_Session] = []
        self.attach("127.0.0.1", port, {"subProcess": True}, 0)

    def attach(self, host: str, port: int, arguments: dict[str, Any], pid: int) -> None:
        self._sessions.append(_Session(self, _connected(host, port), arguments, pid))

    def next_stops(self, count: int) -> list[Stop]:
        """Wait until so many processes are held at the breakpoint."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.stops) >= count, TIMEOUT), (
                f"{len(self.stops)} of {count} processes have reached the breakpoint; attached: {self.attached}"
            )
            taken, self.stops = self.stops[:count], self.stops[count:]
        return taken

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class _Session:
    """A connection for one process, on a thread of its own."""

    def __init__(self, editor: Editor, link: socket.socket, arguments: dict[str, Any], pid: int) -> None:
        self._editor, self._link, self._arguments, self._pid = editor, link, arguments, pid
        self._number, self._lock = 0, threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.request("initialize", adapterID="rallypoint", pathFormat="path")

    def request(self, command: str, **arguments: Any) -> None:
        with self._lock:
            self._number += 1
            message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
            body = json.dumps(message).encode()
            self._link.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def close(self) -> None:
        with suppress(OSError):  # the other end has closed it
            self._link.shutdown(socket.SHUT_RDWR)
        self._reader.join(TIMEOUT)
        self._link.close()

    def _read(self) -> None:
        with self._link.makefile("rb") as file:
            try:
                while head := file.readline():
                    length = int(head.partition(b":")[2])
                    file.readline()
                    self._handle(json.loads(file.read(length)))
            except OSError:  # the process was killed
                return

    def _handle(self, message: dict[str, Any]) -> None:
        editor, body = self._editor, message.get("body") or {}
        match message.get("event") or message.get("command"):
            case "initialize":
                self.request("attach", **self._arguments)
            case "initialized":
                self.request("setBreakpoints", **editor.breakpoint)
                self.request("configurationDone")
            case "debugpyAttach":
                editor.attached.append(body["name"])
                editor.attach(body["connect"]["host"], body["connect"]["port"], body, body["subProcessId"])
            case "stopped":
                with editor.changed:
                    editor.stops.append(Stop(self._pid, self, body["threadId"]))
                    editor.changed.notify_all()


def _connected(host: str, port: int) -> socket.socket:
    def connect() -> socket.socket | None:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:  # it does not listen yet
            return None

    return until(connect, f"debugpy listens at {host}:{port}", TIMEOUT)
