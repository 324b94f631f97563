"""The live line of a waiting agent on a terminal, among other lines."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.agent.loop import AgentLoop
from rallypoint.base.stderr import STDERR_LOCK, print_error_line
from rallypoint.control.protocol.messages import Progress, ProgressText
from rallypoint.features.live_line import LiveLine, composed, shows_live_line
from rallypoint.observe.rendezvous_log import live_words
from rallypoint.workers.logs.console import ConsoleStream, open_sinks
from tests.unit.agent.test_policy import placed
from tests.unit.agent.thread_workers import ThreadWorkers

WORDS = ("waiting for nodes: 27 of 32 joined", "missing at least 5")
FORMING = Progress(0, False, 27, 32, 32, (), False)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error is a terminal; yields its other end."""
    reading, writing = os.openpty()
    saved = os.dup(2)
    os.dup2(writing, 2)
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(os.dup(2), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        try:
            yield reading
        finally:
            os.dup2(saved, 2)
            STDERR_LOCK.take_live_line()
            STDERR_LOCK.line_unfinished = False
            for fd in (reading, writing, saved):
                os.close(fd)


def screen(data: bytes) -> list[str]:
    """The lines that a terminal wait_for."""
    lines = [""]
    for part in re.split(r"(\n|\r\x1b\[K|\r)", data.decode().replace("\r\n", "\n")):
        if part == "\n":
            lines.append("")
        elif part == "\r\x1b[K":
            lines[-1] = ""
        elif part != "\r":
            lines[-1] += part
    return lines


def wait_for(reading: int, lines: list[str]) -> None:
    """Wait until the terminal wait_for these lines."""
    data = b""
    while screen(data) != lines:
        assert select.select([reading], [], [], 10.0)[0], f"{screen(data)} instead of {lines}"
        data += os.read(reading, 4096)


def test_the_line_is_rewritten_in_place_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as reading:
        assert shows_live_line()
        line = LiveLine(100.0)
        line.show(WORDS, 141.0)
        wait_for(reading, ["waiting for nodes: 27 of 32 joined, 41 s, missing at least 5"])
        line.redraw(142.0)
        wait_for(reading, ["waiting for nodes: 27 of 32 joined, 42 s, missing at least 5"])
        line.end()
        line.end()
        line.redraw(143.0)
        os.write(2, b".")
        wait_for(reading, ["."])
        monkeypatch.setenv("TERM", "dumb")
        assert not shows_live_line(), "a dumb terminal cannot rewrite"


def test_other_lines_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as reading:
        sinks = open_sinks(2, 2)
        worker = ConsoleStream(sinks[-1], 1)
        line = LiveLine(0.0)
        line.show(WORDS, 1.0)
        print_error_line("W a line of the log")
        line.redraw(2.0)
        worker.write(b"[default0]:a worker's line\n")
        line.redraw(3.0)
        worker.write(b"a line that is not")
        line.redraw(4.0)
        line.end()
        print_error_line("the last")
        for sink in sinks:
            sink.close()
        wait_for(reading, ["W a line of the log", "[default0]:a worker's line", "a line that is not", "the last", ""])


@pytest.mark.parametrize("width", [20, 40, 61, 200])
def test_the_line_fits_the_terminal(width: int) -> None:
    assert len(composed(WORDS, 41.0, width)) < max(width, 21)


@pytest.mark.parametrize(
    ("progress", "before", "after"),
    [
        (FORMING, "waiting for nodes: 27 of 32 joined", "missing 5"),
        (FORMING._replace(min_nodes=30), "waiting for nodes: 27 of 32 joined", "missing at least 3"),
        (FORMING._replace(expected=("b\x1b[2J", "c")), "waiting for nodes: 27 of 32 joined", "missing 5: b?[2J, c"),
        (FORMING._replace(min_nodes=2, starts_in=3.0), "waiting for nodes: 27 of 32 joined", "starting in 3 s"),
        (FORMING._replace(spare=True, complete=True), "waiting as a spare", "all 32 places of round 0 are taken"),
        (FORMING._replace(complete=True), "waiting for the next round", "round 0 runs with 27 nodes"),
    ],
)
def test_live_words(progress: Progress, before: str, after: str) -> None:
    assert live_words(progress) == (before, after)


def test_the_line_is_erased_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may write to the same terminal."""
    shown: list[bool] = []

    class Workers(ThreadWorkers):
        def start(self) -> None:
            shown.append(STDERR_LOCK.shows_live_line)
            super().start()

    with terminal(monkeypatch):
        workers = Workers(lambda rank, start, stopping: rank)
        loop = AgentLoop(workers)
        loop._hear(ProgressText("1 of 2", warning=False, live=WORDS))
        assert STDERR_LOCK.shows_live_line
        loop._hear(placed(0))
        list(loop._actions.step())
        workers.join()
        loop._mailbox.close()
    assert shown == [False]
