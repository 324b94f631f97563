"""Log lines on standard error: complete, and never in the middle of a worker's line."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable

import pytest

from rallypoint.base import log, stderr
from rallypoint.base.stderr import STDERR_LOCK, OutputLock, print_error_line
from rallypoint.workers.logs.console import ConsoleSink, ConsoleStream
from tests.interrupts import interrupt_everywhere

_DEADLINE = 120.0


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Our logger, not configured yet; restored after the test."""
    own = logging.getLogger("rallypoint")
    for name, value in {"handlers": [], "propagate": True, "level": logging.WARNING}.items():
        monkeypatch.setattr(own, name, value)
    monkeypatch.setattr(log, "_label", "")
    return own


def logged(capsys: pytest.CaptureFixture[str], logger: logging.Logger) -> list[str]:
    logger.warning("[default] round 0 ended\n  1 rank (3)")
    logger.error("[trainer] no")
    return capsys.readouterr().err.split("\n")


TIME = r"[0-2]\d:[0-5]\d:[0-6]\d"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_lines_on_a_terminal(
    no_color: str, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    log.configure("node3: ", "rallyrun")
    first, second, third, _ = logged(capsys, logger)
    assert ("\x1b" in first, "\x1b" in third) == (not no_color, not no_color)
    first, third = (re.sub(r"\x1b\[\d+m", "", line) for line in (first, third))
    assert re.fullmatch(rf"node3: {TIME} rallyrun: round 0 ended", first)
    assert second == "node3:   1 rank (3)"
    assert re.fullmatch(rf"node3: {TIME} rallyrun: error: \[trainer\] no", third)


@pytest.mark.parametrize(("on_terminal", "form"), [(False, "auto"), (True, "glog")])
def test_lines_elsewhere(
    on_terminal: bool,
    form: str,
    logger: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    log.configure("", "rallyrun", form)
    lines = logged(capsys, logger)
    prefix = rf"\d{{4}} {TIME}\.\d{{6}} {os.getpid()} \S+test_log\.py:\d+\] "
    assert re.fullmatch(rf"W{prefix}\[default\] round 0 ended", lines[0])
    assert re.fullmatch(rf"W{prefix}  1 rank \(3\)", lines[1])
    assert re.fullmatch(rf"E{prefix}\[trainer\] no", lines[2])


def test_a_worker_s_unfinished_line_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    STDERR_LOCK.line_unfinished = True
    print_error_line("ours")
    print_error_line("ours again")
    assert capsys.readouterr().err == "\nours\nours again\n"


@pytest.mark.parametrize(
    ("written", "unfinished"), [([b"half"], True), ([b"half", b" a line\n"], False), ([b"\n"], False)]
)
def test_unfinished_lines_are_noticed(written: list[bytes], unfinished: bool) -> None:
    reading, writing = os.pipe()
    lock = OutputLock()
    sink = ConsoleSink(writing, lock=lock)
    for piece in written:
        ConsoleStream(sink, 1).write(piece)
    assert lock.line_unfinished is unfinished
    sink.close()
    assert os.read(reading, 100) == b"".join(written)
    os.close(reading)


def next_in_turn(lock: OutputLock) -> threading.Thread:
    """Start a thread, and return it once it waits for the lock."""

    def wait() -> None:
        with lock.hold():
            had.set()

    had = threading.Event()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    free = True
    while free and not had.is_set():

        def probe() -> None:
            nonlocal free
            if free := lock._queue_lock.acquire(blocking=False):
                lock._queue_lock.release()

        assert in_time(probe)
    return thread


def in_time(work: Callable[[], None]) -> bool:
    """Whether a call on its own thread returns."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_DEADLINE)
    return not thread.is_alive()


def test_the_lock_is_reentrant() -> None:
    lock = OutputLock()
    others: list[threading.Thread] = []

    def nested() -> None:
        with lock.hold():
            others.append(next_in_turn(lock))
            with lock.hold():
                assert others[0].is_alive()

    assert in_time(nested)
    others[0].join(_DEADLINE)
    assert not others[0].is_alive()


def test_the_lock_s_timeout_includes_the_queue() -> None:
    """A blocked console delays its writer and the next one, but not the log."""
    lock = OutputLock()

    def last() -> None:
        with lock.hold(0.01):
            pass

    with lock.hold():
        other = next_in_turn(lock)
        assert in_time(last)
    other.join(_DEADLINE)
    assert not other.is_alive()


def test_an_interrupted_line_does_not_block_later_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when Ctrl-C stops the agent, which logs how it stops its workers while their output is shown."""
    places: list[str] = []

    def write() -> None:
        for place, _ in interrupt_everywhere(lambda: print_error_line("cut short")):
            next_in_turn(stderr.STDERR_LOCK)
            print_error_line("whole")
            places.append(place)
            monkeypatch.setattr(stderr, "STDERR_LOCK", OutputLock())

    assert in_time(write), f"a deadlock after {places[-1:]}"
    assert capsys.readouterr().err.count("whole\n") == len(places) > 10
