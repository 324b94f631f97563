"""Start method forkserver, the agent's end: see `server`."""

from __future__ import annotations

import errno
import marshal
import os
from socket import AF_UNIX, SOCK_SEQPACKET, recv_fds, send_fds, socket, socketpair
from typing import Any

from rallypoint.base.errors import RallypointError
from rallypoint.workers.process import ChildProcess, WorkerProcess, process_start_error
from rallypoint.workers.reaper.client import readable

_NOTICE = 1.0
"""Seconds for the notice of a worker whose pidfd tells that it has ended. It comes in well under a millisecond, except
from a worker that a debugger holds."""
_IMPORT_TIMEOUT = 300.0
"""Seconds for the server to start a worker; before the first it imports the main module, as large as that may be."""


class ForkServer:
    """The server of one start of workers, and what is known of their ends."""

    def __init__(self) -> None:
        self.link, self.server_end = socketpair(AF_UNIX, SOCK_SEQPACKET)
        self.link.settimeout(_IMPORT_TIMEOUT)
        self._process: WorkerProcess | None = None
        self._ended: dict[int, int] = {}

    def started(self, process: WorkerProcess, parcel: int) -> None:
        """It runs. Hand it a parcel that tells of the main module."""
        self._process = process
        self.server_end.close()
        self._send(b"\0", [parcel])

    def fork(self, channel: socket, stdout: int, stderr: int) -> tuple[int, int]:
        """Start a worker. Returns its pid and a pidfd.

        Raises:
            RallypointError: it could not be started, or the server is gone.
        """
        self._send(b"\0", [channel.fileno(), stdout, stderr])
        while True:
            message, descriptors = self._receive()
            if message[0] == "ended":
                self._ended[message[1]] = message[2]
            elif message[0] == "failed" or not descriptors:
                number = message[1] if message[0] == "failed" else errno.EMFILE
                raise process_start_error("by the fork server", OSError(number, os.strerror(number)))
            else:
                return message[1], descriptors[0]

    def exit_status_of(self, pid: int, patience: float) -> int | None:
        """How a worker has ended; None if that does not come within this many seconds.

        Raises:
            RallypointError: the server is gone.
        """
        while pid not in self._ended:
            if not readable(self.link.fileno(), patience):
                return None
            message, _ = self._receive()
            self._ended[message[1]] = message[2]
        return self._ended[pid]

    def close(self) -> None:
        """Let go of it; it ends then. Idempotent."""
        self.server_end.close()
        self.link.close()
        if self._process is not None:
            self._process.release()

    def _send(self, data: bytes, descriptors: list[int]) -> None:
        try:
            send_fds(self.link, [data], descriptors)
        except OSError:
            raise _server_gone() from None

    def _receive(self) -> tuple[tuple[Any, ...], list[int]]:
        try:
            data, descriptors, _, _ = recv_fds(self.link, 4096, 1)
        except OSError:
            raise _server_gone() from None
        if not data:
            raise _server_gone()
        for fd in descriptors:
            os.set_inheritable(fd, False)
        return marshal.loads(data), descriptors


class ForkServerProcess(ChildProcess):
    """A worker that is a copy of the server."""

    def __init__(self, server: ForkServer, channel: socket, stdout: int, stderr: int) -> None:
        """Start it.

        Args:
            server: what starts it.
            channel: where its parcel comes from.
            stdout: the descriptor to write to.
            stderr: the same for standard error.

        Raises:
            RallypointError: it could not be started.
        """
        super().__init__(*server.fork(channel, stdout, stderr))
        self._server = server

    def _collect_exit(self) -> None:
        try:
            code = self._server.exit_status_of(self.pid, 0.0 if self.held_by_debugger else _NOTICE)
        except RallypointError:
            self._end_as_orphan()
        else:
            self.held_by_debugger = code is None
            if code is not None:
                self._end(code)


def _server_gone() -> RallypointError:
    return RallypointError(
        "the fork server, of which the workers are copies, has ended; look at what else ends processes on this machine"
    )
