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


def test_what_fills_its_parts_has_a_last_one() -> None:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    data = bytes(2 * MAX_PART)
    collecting.start_collecting(CollectRequested(1, CollectKind.STACKS), lambda: data, sent.put)
    assert [sent.get(timeout=TIMEOUT).is_last for _ in range(2)] == [False, True]


def test_a_status_is_reported_while_the_ages_of_outputs_are_awaited() -> None:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    known = threading.Event()

    class Context:
        error_files: ClassVar = {0: "/logs/job_x/attempt_0/0/error.json"}

        def output_ages(self) -> Callable[[], tuple[float, ...]]:
            return lambda: (float(known.wait(TIMEOUT)),)

        def console_blocked_for(self) -> float:
            return 2.5

        exit_codes: ClassVar = {0: 0}

        def ended_at(self, _local_rank: int) -> float:
            return math.inf

        def pids(self) -> dict[int, int]:
            return {0: 7, 1: 8}

        def relay(self, local_rank: int, _stream: int) -> object:
            return SimpleNamespace(unread=lambda: 65536) if local_rank else None

    placed = SimpleNamespace(round=3)
    group = SimpleNamespace(workers=[], placement=placed, spec=SimpleNamespace(in_place_of=""), group_rank=1)
    folder = WorkerFolder(set, sent.put)
    workers = SimpleNamespace(
        group=group, folder=folder, pcontext=Context(), waiting_processes=tuple, began=math.inf, remarks={}
    )
    workers.rendezvous, workers.watchers, workers.hooks = SimpleNamespace(send=sent.put), Watchers(), Hooks()
    workers.hooks.figures.append(lambda: {"lines": 3})
    answer = reports.Reports(Agent(workers, print, SYSTEM_CLOCK, print)).messages()[ReportRequested]  # type: ignore[arg-type]
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
        (
            (*RALLYRUN, "train.py", "-p", "hunter2", "--data=x"),
            ("python", "-u", "train.py", "-p", "hunter2", "--data=x"),
            "rallyrun --nproc-per-node=2 train.py -p '<masked>' --data=x",
            "rallyrun --nproc-per-node=2 train.py ...",
        ),
        ((*RALLYRUN, "train.py"), ("python", "-u", "train.py"), *["rallyrun --nproc-per-node=2 train.py"] * 2),
        (
            (*RALLYRUN, "--no-python", "./train", "hunter"),
            ("./train", "hunter"),
            "rallyrun --nproc-per-node=2 --no-python ./train hunter",
            "rallyrun --nproc-per-node=2 --no-python ./train ...",
        ),
        (
            (*RALLYRUN, "-m", "train", "hunter"),
            ("python", "-u", "-m", "train", "hunter"),
            "rallyrun --nproc-per-node=2 -m train hunter",
            "rallyrun --nproc-per-node=2 -m train ...",
        ),
        (
            ("python", "launch.py", "--secret-of-mine", "hunter2", "word"),
            (print, 1, 2),
            "python launch.py --secret-of-mine '<masked>' word",
            "python launch.py ...",
        ),
        (("python", "caf\udce9.py"), (print,), *["python 'caf?.py'"] * 2),
    ],
)
def test_strangers_are_not_shown_the_arguments_of_a_program(
    words: tuple[str, ...], program: tuple[object, ...], shown: str, to_strangers: str
) -> None:
    assert reports.command_line(words, program, hides=False) == shown
    assert reports.command_line(words, program, hides=True) == to_strangers


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

    def told(self, node: str, data: bytes, size: int = 20, number: int = 1) -> None:
        """A node tells something in parts."""
        for at in range(0, max(1, len(data)), size):
            self.reporter.add(
                CollectedPart(number, data[at : at + size], at + size >= len(data), node, is_first=at == 0)
            )

    def ended(self, *silent: str, number: int = 1) -> str:
        """Nothing more comes; the report that is made then."""
        self.reporter.add(CollectionEnded(number, 3, silent))
        report = self.sent.get(timeout=TIMEOUT)
        assert report[:2] == (number, 3)
        return report.report


def evidence(rank: int, exit_code: int) -> bytes:
    """What a node tells of a worker that has ended."""
    return encode_evidence(collect_evidence(ExaminedNode("host", (ExaminedWorker(rank, 7, exit_code),))))


@pytest.mark.parametrize("data", [b"", b"\xff\x00", b"{}", b"[1, 2"])
def test_a_node_that_tells_nothing_that_can_be_read_is_named(data: bytes) -> None:
    parts = Reports()
    parts.told("a", evidence(0, 0))
    parts.told("bad", data)
    text = parts.ended()
    assert "1 rank (0): ended with exit code 0" in text
    assert "no evidence from bad" in text


def test_a_node_that_did_not_finish_is_named_once() -> None:
    parts = Reports()
    parts.reporter.add(CollectedPart(1, evidence(0, 0), False, "half"))
    assert parts.ended("half").count("half") == 1


def test_what_is_kept_of_all_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "_MAX_TOTAL", 1000)
    parts = Reports()
    parts.told("a", evidence(0, 0))
    parts.told("large", b"x" * 5000)
    assert parts.taken == 2, "it has read what it does not keep"
    text = parts.ended()
    assert "1 rank (0): ended" in text
    assert "no evidence from large" in text


def test_each_hang_has_a_report_of_its_own() -> None:
    parts = Reports()
    parts.told("a", evidence(0, 0))
    parts.told("a", evidence(5, 0), number=2)
    text = parts.ended(number=2)
    assert "rank (5)" in text
    assert "rank (0)" not in text
