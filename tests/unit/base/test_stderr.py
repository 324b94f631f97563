"""Log lines where nothing reads standard error."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from rallypoint.base import stderr
from rallypoint.base.stderr import STDERR_LOCK, print_error_line, written_beside
from tests.waiting import until

_DEADLINE = 60.0


class Pipe:
    """Standard error as a pipe that is full, until somebody reads it."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        self.stream: TextIO = os.fdopen(writing, "w")
        os.set_blocking(writing, False)
        self._filling = 0
        for size in (4096, 1):
            while (written := _write(writing, size)) > 0:
                self._filling += written
        os.set_blocking(writing, True)

    def lines(self, last: str) -> list[str]:
        """Read until this line has come; returns the lines, without what filled the pipe."""
        data = b""
        while not data.endswith(f"{last}\n".encode()):
            data += os.read(self._reading, 65536)
        filling, self._filling = self._filling, 0
        return data[filling:].decode().splitlines()

    def close(self) -> None:
        os.close(self._reading)
        self.stream.close()


def _write(fd: int, size: int) -> int:
    try:
        return os.write(fd, b"." * size)
    except BlockingIOError:
        return 0


@contextmanager
def full_pipe() -> Iterator[Pipe]:
    """Standard error is a pipe that is full. (Not a fixture: pytest puts back its own where the test begins.)"""
    made, before = Pipe(), sys.stderr
    sys.stderr = made.stream
    try:
        yield made
    finally:
        sys.stderr = before
        made.close()


class Reader:
    """Reads a pipe on another thread, until a line has come."""

    def __init__(self, pipe: Pipe, last: str) -> None:
        self._found: list[str] = []
        self._thread = threading.Thread(target=lambda: self._found.extend(pipe.lines(last)))
        self._thread.start()

    def lines(self) -> list[str]:
        self._thread.join(_DEADLINE)
        return self._found


def test_nobody_waits_for_a_console_that_is_not_read() -> None:
    with full_pipe() as pipe:
        with written_beside():
            for number in range(3):
                print_error_line(f"line {number}")  # returns: it would never, on the thread of the caller
            until(lambda: STDERR_LOCK.blocked_for() > 0, "a write that waits")
            reader = Reader(pipe, "line 2")
        assert reader.lines() == ["line 0", "line 1", "line 2"]
    assert STDERR_LOCK.blocked_for() == 0.0


def test_lines_that_did_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr, "_MOST_BYTES", 20)
    lost = "2 lines of this log are missing here because nothing read it"
    with full_pipe() as pipe:
        with written_beside():
            print_error_line("first")
            until(lambda: STDERR_LOCK.blocked_for() > 0, "a write that waits")
            for number in range(5):
                print_error_line(f"line {number}")
            reader = Reader(pipe, "line 2")
            until(lambda: STDERR_LOCK.blocked_for() == 0.0)
            reader.lines()
            rest = Reader(pipe, lost)
        assert [*reader.lines(), *rest.lines()] == ["first", "line 0", "line 1", "line 2", lost]


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr, "_DRAIN", 0.1)
    with full_pipe() as pipe:
        with written_beside():
            print_error_line("unread")
        Reader(pipe, "unread").lines()  # so that the thread which waits for the console ends
        until(lambda: STDERR_LOCK.blocked_for() == 0.0)


@pytest.mark.process
def test_a_forked_child_writes_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with written_beside():
        print_error_line("of the parent")
        until(lambda: "of the parent" in capfd.readouterr().err)
        child = os.fork()
        if not child:
            print_error_line("of the child")
            os._exit(0)
        os.waitpid(child, 0)
    assert capfd.readouterr().err == "of the child\n"
