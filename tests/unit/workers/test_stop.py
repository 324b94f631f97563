"""The stop ladder, on real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.stop import stop_all
from tests.unit.workers.test_process import ends

DEAF = "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'up'); signal.pause()"
GENTLE = "import os, signal; signal.signal(15, lambda *_: os._exit(0)); os.write(1, b'up'); signal.pause()"


@contextmanager
def up(text: str) -> Iterator[WorkerProcess]:
    """A process that has said that it is ready."""
    read, write = os.pipe()
    try:
        process = WorkerProcess([sys.executable, "-c", text], os.environ, write, None)
        os.close(write)
        try:
            assert os.read(read, 2) == b"up"
            yield process
        finally:
            process.signal(signal.SIGKILL)
            ends(process)
            process.reap()
    finally:
        os.close(read)


class Stuck:
    """A process that the kernel does not let go, as after a disk has gone: nothing ends it."""

    pid = 4_000_000

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.got: list[int] = []

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> None:
        return None

    def signal(self, number: int) -> None:
        self.got.append(number)


def test_those_who_listen_end_by_themselves() -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(up(GENTLE)) for _ in range(3)]
        assert stop_all(processes, signal.SIGTERM, 30) == []
        assert [process.poll() for process in processes] == [0, 0, 0]


def test_who_does_not_listen_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    with up(GENTLE) as gentle, up(DEAF) as deaf:
        assert stop_all([deaf, gentle], signal.SIGTERM, 0.1) == []
        assert deaf.poll() == -signal.SIGKILL


def test_the_signal_that_was_asked_for_is_sent() -> None:
    with up(DEAF) as process:
        assert stop_all([process], signal.SIGINT, 30) == []
        assert process.poll() in {1, -signal.SIGINT}, "python ends by a KeyboardInterrupt"


def test_who_has_ended_is_left_alone() -> None:
    process = WorkerProcess(["true"], os.environ, None, None)
    ends(process)
    assert stop_all([process], signal.SIGTERM, 30) == []
    assert process.poll() == 0
    process.reap()


def test_nobody_to_stop() -> None:
    assert stop_all([], signal.SIGTERM, 30) == []


def test_who_is_stuck_in_the_kernel_is_told_of_and_does_not_hold_up_the_end() -> None:
    read, write = os.pipe()
    try:
        stuck = Stuck(read)
        with up(GENTLE) as gentle:
            assert stop_all([stuck, gentle], signal.SIGTERM, 0.05) == [stuck]
        assert stuck.got == [signal.SIGTERM, signal.SIGKILL]
    finally:
        os.close(read)
        os.close(write)


class Late(Stuck):
    """A process that ends between two looks: its descriptor is readable before it is found to have ended."""

    pid = 4_000_001

    def __init__(self, fd: int, looks: int) -> None:
        super().__init__(fd)
        self._looks = looks

    def poll(self) -> int | None:  # type: ignore[override]
        self._looks -= 1
        return 0 if self._looks < 0 else None


@pytest.mark.parametrize("looks", range(2, 6))
def test_an_end_between_two_looks_does_not_keep_the_processor_busy(looks: int) -> None:
    class Counting(Stuck):
        looks = 0

        def poll(self) -> None:
            self.looks += 1

    (quiet, far), (ended, other) = os.pipe(), os.pipe()
    try:
        os.write(other, b"x")
        stuck = Counting(quiet)
        assert stop_all([stuck, Late(ended, looks)], signal.SIGKILL, 0.2) == [stuck]
        assert stuck.looks < 20
    finally:
        for fd in (quiet, far, ended, other):
            os.close(fd)
