"""The handler for `--event-log-handler=jsonl:PATH`: one event per line, in a file that is rotated by size.

PATH is a file, or a folder (an existing one, or a path with a trailing slash) in which each agent has its own file.
`jsonl:PATH?max_mb=64&keep=3` sets the maximum size of a file, and how many older ones to keep: PATH.1, PATH.2, ...

Laws:

1. The agent never waits for a disk: a thread writes. Lost lines are counted, and the file reports the count when it can
   be written again.
2. A line is appended in one system call, so agents on one machine can share a file.
3. The file is private to our own user, and never written through a link.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import socket
import threading
import time
from urllib.parse import parse_qs

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import open_to_append
from rallypoint.observe.telemetry.agent_events import AgentEvent, Event, EventsLost, TorchEvent, encode

log = get_logger(__name__)

PREFIX = "jsonl:"
_MAX_QUEUE = 10_000
"""Maximum number of lines to queue while the disk hangs."""
_FLUSH = 5.0
"""Seconds to wait for the disk when a run ends."""
_MEGABYTE = 1_000_000


class JsonLinesHandler(logging.Handler):
    """Writes events to the file in `destination`, the text after `jsonl:`. Raises UserError if the file cannot be
    written."""

    takes_agent_events = True
    """This handler accepts `AgentEvent`s in addition to torch's events."""

    def __init__(self, destination: str) -> None:
        path, _, options = destination.partition("?")
        if not path:
            raise UserError(f"{PREFIX}{destination} contains no path; use {PREFIX}PATH, such as {PREFIX}events.jsonl")
        limits = _limits(destination, options)
        if path.endswith("/") or os.path.isdir(path):
            path = os.path.join(path, f"events-{socket.gethostname()}-{os.getpid()}.jsonl")
        self.path = os.path.abspath(path)
        self._max_bytes, self._keep = limits["max_mb"] * _MEGABYTE, limits["keep"]
        try:
            if not os.path.exists(folder := os.path.dirname(self.path)):
                os.makedirs(folder, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise UserError(
                f"events cannot be written to {self.path}: {error.strerror}; choose another file after {PREFIX}"
            ) from None
        super().__init__()  # not earlier: this registers the handler to be flushed when the process ends
        self._lines: queue.Queue[bytes | threading.Event | None] = queue.Queue(_MAX_QUEUE)
        self._lost = 0
        self._last: AgentEvent | None = None
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="rallypoint-events", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "rallypoint_event", None)
        if isinstance(event, Event):
            event = _torch_line(event)
        if isinstance(event, AgentEvent):
            self._last = event
            self._append(encode(event) + b"\n")

    def flush(self) -> None:
        """Wait for a limited time until all events are written."""
        written = threading.Event()
        self._append(written)
        written.wait(_FLUSH)

    def close(self) -> None:
        self.flush()
        self._append(None)
        super().close()

    def _append(self, line: bytes | threading.Event | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    # On the thread

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
            else:
                self._write(line)
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        try:
            self._rotate_if_due(len(line))
            if self._lost and self._last is not None:
                lost, last = self._lost, self._last
                loss = EventsLost(
                    time=last.time, elapsed=last.elapsed, job=last.job, host=last.host, pid=last.pid, count=lost
                )
                os.write(self._file, encode(loss) + b"\n")
                self._lost -= lost
            os.write(self._file, line)
            self._complained = False
        except OSError as error:
            self._lost += 1
            if not self._complained:
                self._complained = True
                log.warning("events are being lost: %s cannot be written: %s", self.path, error.strerror)

    def _open(self) -> int:
        return open_to_append(self.path)

    def _rotate_if_due(self, more: int) -> None:
        """Rotate the file if it is full. If another agent on this machine did so, our path leads to another file."""
        own = os.fstat(self._file)
        if own.st_size + more > self._max_bytes and own.st_size:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                if self._is_at_path(own.st_ino):
                    self._shift()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        if not self._is_at_path(own.st_ino):
            former, self._file = self._file, self._open()
            os.close(former)

    def _is_at_path(self, inode: int) -> bool:
        try:
            return os.stat(self.path).st_ino == inode
        except FileNotFoundError:
            return False

    def _shift(self) -> None:
        if not self._keep:
            os.unlink(self.path)
            return
        for number in range(self._keep - 1, 0, -1):
            if os.path.exists(f"{self.path}.{number}"):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        os.replace(self.path, f"{self.path}.1")


_LIMITS = {"max_mb": (64, 1), "keep": (3, 0)}
"""Options with their defaults and minimum values."""


def _limits(destination: str, options: str) -> dict[str, int]:
    limits = {name: default for name, (default, _) in _LIMITS.items()}
    try:
        fields = parse_qs(options, keep_blank_values=True, strict_parsing=bool(options))
        for name, (text, *more) in fields.items():
            limits[name] = int(text)
            if more or limits[name] < _LIMITS[name][1]:
                raise ValueError
    except (ValueError, KeyError):
        raise UserError(
            f"{PREFIX}{destination}: {options!r} does not describe a rotation; use a form such as "
            f"{PREFIX}PATH?max_mb=64&keep=3"
        ) from None
    return limits


def _torch_line(event: Event) -> TorchEvent:
    metadata = dict(event.metadata)
    inner = metadata.get("metadata")
    parsed = json.loads(inner) if isinstance(inner, str) else inner
    elapsed = metadata.get("total_run_time")
    return TorchEvent(
        time=time.time(),
        elapsed=float(elapsed) if isinstance(elapsed, int) else 0.0,
        job=str(metadata.get("run_id", "")),
        host=str(metadata.get("hostname", "")),
        pid=os.getpid(),
        name=event.name,
        source=event.source.name,
        metadata={**metadata, "metadata": parsed},
    )
