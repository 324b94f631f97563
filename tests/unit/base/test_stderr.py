"""Log lines while nothing reads standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from rallypoint.base import stderr
from rallypoint.base.stderr import STDERR_LOCK, print_error_line, written_beside
from tests.waiting import in_thread, until


class Pipe:
    """Standard error as a full pipe."""

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
        """Read up to this line; return the lines, without the filling."""
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
    """Make standard error a full pipe. (Not a fixture: pytest would replace it when the test begins.)"""
    made, before = Pipe(), sys.stderr
    sys.stderr = made.stream
    try:
        yield made
    finally:
        sys.stderr = before
        made.close()


def test_an_unread_console_blocks_nobody() -> None:
    with full_pipe() as pipe:
        with written_beside():
            for number in range(3):
                print_error_line(f"line {number}")  # would block on the caller's thread
            until(lambda: STDERR_LOCK.blocked_for() > 0, "a write that waits")
            reader = in_thread(lambda: pipe.lines("line 2"))
        assert reader() == ["line 0", "line 1", "line 2"]
    assert STDERR_LOCK.blocked_for() == 0.0


def test_lost_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr, "_MOST_BYTES", 20)
    lost = "2 lines of this log are missing here because nothing read it"
    with full_pipe() as pipe:
        with written_beside():
            print_error_line("first")
            until(lambda: STDERR_LOCK.blocked_for() > 0, "a write that waits")
            for number in range(5):
                print_error_line(f"line {number}")
            reader = in_thread(lambda: pipe.lines("line 2"))
            until(lambda: STDERR_LOCK.blocked_for() == 0.0)
            shown = reader()
            rest = in_thread(lambda: pipe.lines(lost))
        assert [*shown, *rest()] == ["first", "line 0", "line 1", "line 2", lost]


def test_closing_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr, "_DRAIN", 0.1)
    with full_pipe() as pipe:
        with written_beside():
            print_error_line("unread")
        pipe.lines("unread")  # so that the blocked thread ends
        until(lambda: STDERR_LOCK.blocked_for() == 0.0)


@pytest.mark.process
def test_a_forked_child_writes_directly(capfd: pytest.CaptureFixture[str]) -> None:
    with written_beside():
        print_error_line("of the parent")
        until(lambda: "of the parent" in capfd.readouterr().err)
        child = os.fork()
        if not child:
            print_error_line("of the child")
            os._exit(0)
        os.waitpid(child, 0)
    assert capfd.readouterr().err == "of the child\n"
