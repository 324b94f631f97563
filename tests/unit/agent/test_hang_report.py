"""The nodes' evidence of a hang becomes one report, whatever it contains."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rallypoint.agent.feature import Agent
from rallypoint.agent.folder import WorkerFolder
from rallypoint.agent.sources import Hooks, Watchers
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.control.protocol.messages import (
    MAX_PART,
    CollectedPart,
    CollectionEnded,
    CollectKind,
    CollectRequested,
    HangReport,
    NodeReport,
    ReportRequested,
    Taken,
)
from rallypoint.features import collecting, reports
from rallypoint.features.hangs import evidence as hangs
from rallypoint.features.hangs.evidence import HangReporter
from rallypoint.observe.hangs.evidence import ExaminedNode, ExaminedWorker, collect_evidence
from rallypoint.observe.hangs.messages import encode_evidence

TIMEOUT = 60.0


def test_the_last_of_full_parts() -> None:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    data = bytes(2 * MAX_PART)
    collecting.start_collecting(CollectRequested(1, CollectKind.STACKS), lambda: data, sent.put)
    assert [sent.get(timeout=TIMEOUT).is_last for _ in range(2)] == [False, True]


def test_reports_do_not_wait_for_the_ages_of_outputs() -> None:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    known = threading.Event()

    class Context:
        error_files: ClassVar = {0: "/logs/job_x/attempt_0/0/error.json"}

        def output_ages(self) -> Callable[[], tuple[float, ...]]:
            return lambda: (float(known.wait(TIMEOUT)),)

        exit_codes: ClassVar = {0: 0}
        console_blocked_for = staticmethod(lambda: 2.5)
        ended_at = staticmethod(lambda _local_rank: math.inf)
        pids = staticmethod(lambda: {0: 7, 1: 8})
        relay = staticmethod(lambda rank, _stream: SimpleNamespace(unread=lambda: 65536) if rank else None)

    placed = SimpleNamespace(round=3)
    group = SimpleNamespace(workers=[], placement=placed, spec=SimpleNamespace(in_place_of=""), group_rank=1)
    folder = WorkerFolder(set, sent.put)
    workers = SimpleNamespace(
        group=group, folder=folder, pcontext=Context(), waiting_processes=tuple, began=math.inf, remarks={}
    )
    workers.rendezvous, workers.watchers, workers.hooks = SimpleNamespace(send=sent.put), Watchers(), Hooks()
    workers.hooks.figures.append(lambda: {"lines": 3})
    agent: Any = Agent(workers, print, SYSTEM_CLOCK, print)  # type: ignore[arg-type]
    answer = reports.Reports(agent).messages()[ReportRequested]
    for _ in range(2):
        answer(ReportRequested())
    ended = ((0, 0, 0.0),)
    expected = NodeReport(3, (), log_folder="/logs/job_x", console_blocked=2.5, console_waiters=(1,), ended=ended)
    expected = expected._replace(figures=(("lines", 3),))
    assert sent.get(timeout=TIMEOUT) == expected
    known.set()
    assert sent.get(timeout=TIMEOUT) == expected._replace(output_ages=(1.0,))


RALLYRUN = ("/venv/bin/python", "/venv/bin/rallyrun", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("words", "program", "shown", "to_strangers"),
    [
        ("train.py -p pw --data", "python -u train.py -p pw --data", "train.py -p '<masked>' --data", "train.py ..."),
        ("train.py", "python -u train.py", "train.py", "train.py"),
        ("--no-python ./train pw", "./train pw", "--no-python ./train pw", "--no-python ./train ..."),
        ("-m train pw", "python -u -m train pw", "-m train pw", "-m train ..."),
    ],
)
def test_strangers_do_not_see_arguments(words: str, program: str, shown: str, to_strangers: str) -> None:
    for hides, expected in ((False, shown), (True, to_strangers)):
        line = reports.command_line((*RALLYRUN, *words.split()), tuple(program.split()), hides=hides)
        assert line == f"rallyrun --nproc-per-node=2 {expected}"


def test_command_lines_of_functions() -> None:
    words, program = ("python", "launch.py", "--secret-of-mine", "hunter2", "word"), (print, 1, 2)
    assert reports.command_line(words, program, hides=False) == "python launch.py --secret-of-mine '<masked>' word"
    assert reports.command_line(words, program, hides=True) == "python launch.py ..."
    for hides in (False, True):
        assert reports.command_line(("python", "caf\udce9.py"), (print,), hides=hides) == "python 'caf?.py'"


class Reports:
    """A reporter, and what it sends."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[HangReport] = queue.SimpleQueue()
        self.taken = 0
        self.reporter = HangReporter(self._send)

    def _send(self, message: HangReport | Taken) -> None:
        if isinstance(message, Taken):
            self.taken += 1
        else:
            self.sent.put(message)

    def add(self, node: str, data: bytes, number: int = 1, *, whole: bool = True) -> None:
        """Add the evidence of a node in parts of 20 bytes."""
        parts = [data[at : at + 20] for at in range(0, max(1, len(data)), 20)]
        for at, part in enumerate(parts):
            last = whole and at == len(parts) - 1
            self.reporter.add(CollectedPart(number, part, last, node, is_first=at == 0))

    def end(self, *silent: str, number: int = 1) -> str:
        """End the collection; returns the report."""
        self.reporter.add(CollectionEnded(number, 3, silent))
        report = self.sent.get(timeout=TIMEOUT)
        assert report[:2] == (number, 3)
        return report.report


def evidence(rank: int, exit_code: int) -> bytes:
    """The evidence of a node whose worker has ended."""
    return encode_evidence(collect_evidence(ExaminedNode("host", (ExaminedWorker(rank, 7, exit_code),))))


@pytest.mark.parametrize("data", [b"", b"\xff\x00", b"{}", b"[1, 2"])
def test_nodes_with_unreadable_evidence_are_named(data: bytes) -> None:
    reports = Reports()
    reports.add("a", evidence(0, 0))
    reports.add("bad", data)
    reports.add("half", evidence(0, 0), whole=False)
    text = reports.end("half")
    assert "1 rank (0): ended with exit code 0" in text
    assert "no evidence from bad" in text
    assert text.count("half") == 1


def test_the_evidence_of_all_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "_MAX_TOTAL", 1000)
    reports = Reports()
    reports.add("a", evidence(0, 0))
    reports.add("large", b"x" * 5000)
    assert reports.taken == 2, "it has read the evidence that it does not keep"
    text = reports.end()
    assert "1 rank (0): ended" in text
    assert "no evidence from large" in text


def test_each_hang_has_its_own_report() -> None:
    reports = Reports()
    reports.add("a", evidence(0, 0))
    reports.add("a", evidence(5, 0), number=2)
    text = reports.end(number=2)
    assert "rank (5)" in text
    assert "rank (0)" not in text
