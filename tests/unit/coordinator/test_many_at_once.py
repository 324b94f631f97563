"""Answers to many nodes at once are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.control.coordinator import coordinator as module
from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.notifications import placeholders_in, standing_without
from rallypoint.control.coordinator.sessions import SessionRecord, SessionState
from rallypoint.control.membership import mappings
from rallypoint.control.membership.endings import missing
from rallypoint.control.membership.state import Close, Fail, Join, NodeId, NodeInfo, Participant, Settings, State
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRequest,
    Placed,
    Progress,
    ProgressRequest,
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from tests.unit.membership.running import done

NODES = [NodeId(f"n{number:03}", 1, number, f"n{number}") for number in range(300)]
INFO = NodeInfo("default", 1, "host", 7000)
CAUSE = Cause(0, 0, "host", 42, 1, "no", "Traceback\n" * 100, 0.0, "")


class Job:
    """Many nodes, which return in new sessions and have missed all notifications."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(Settings("job", len(NODES), len(NODES)), "0")
        self.came = 0
        for number, node in enumerate(NODES):
            self.coordinator.open(number, SessionRecord(node, node.addr), 0.0)
        self.join(NODES)

    def join(self, nodes: list[NodeId]) -> None:
        for number, node in enumerate(NODES):
            if node in nodes:
                self.coordinator.receive(number, JoinRequest(INFO, 600.0), 0.0)

    def fail(self) -> None:
        self.coordinator.receive(0, Fail(self.coordinator.state.round, CAUSE, 3), 0.0)

    def come_back(self, held: Callable[[int], ResumeRequest]) -> list[OutgoingMessage]:
        told = []
        for rank, node in enumerate(NODES):
            number = 1000 + rank
            self.coordinator.open(number, SessionRecord(node, node.addr, state=SessionState.RESUMING), 1.0)
            told += self.coordinator.receive(number, held(rank), 1.0).messages
        return told


def in_round(round_: int, *, over: bool) -> Callable[[int], ResumeRequest]:
    return lambda rank: ResumeRequest("0", INFO, round_, rank, len(NODES), round_over=over, joining=over)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A list that grows with each call of a function of the coordinator's module."""
    calls: list[int] = []
    function = getattr(module, name)

    def counting(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return function(*args, **more)

    monkeypatch.setattr(module, name, counting)
    return calls


def test_missed_places_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.fail()
    job.join(NODES)
    assert job.coordinator.state.round == 1
    assert job.coordinator.state.complete
    calls = counted(monkeypatch, "placements")
    told = job.come_back(in_round(0, over=True))
    assert [notice.placement.group_rank for _, notice in told if isinstance(notice, Placed)] == list(range(len(NODES)))
    assert sum(calls) <= 1


@pytest.mark.parametrize(
    ("request_", "kind"),
    [(Fail(0, CAUSE, 3), RoundEnded), (Close(detail="why " * 1000), JobEnded)],
    ids=["round", "job"],
)
def test_a_missed_end_is_one_message_for_all(request_: Request, kind: type) -> None:
    job = Job()
    job.coordinator.receive(0, request_, 0.0)
    ends = [notice for _, notice in job.come_back(in_round(0, over=False)) if isinstance(notice, kind)]
    assert len(ends) == len(NODES)
    assert len({id(end) for end in ends}) == 1, "it is encoded once"


def test_progress_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.fail()
    job.join(NODES[:-2])
    calls = counted(monkeypatch, "progress")
    told = [job.coordinator.receive(number, ProgressRequest(), 2.0).messages for number in range(len(NODES) - 2)]
    shown = [notice for ((_, notice),) in told if isinstance(notice, Progress)]
    assert len(calls) == 1
    assert {(each.joined, each.expected, each.ends_in) for each in shown} == {
        (len(NODES) - 2, ("n298 (rank 298)", "n299 (rank 299)"), 598.0)
    }
    assert [each.reports for each in shown] == [True] + [False] * (len(NODES) - 3)


def test_missing_fixed_ranks_among_many() -> None:
    job = Settings("job", len(NODES), len(NODES), fixed_ranks=True)
    state = State()
    absent = {0, 130, 131, 256, 299}
    for rank, node in enumerate(NODES):
        if rank not in absent:
            state = done(state, node, Join(INFO._replace(rank_hint=rank)), job)
    assert missing(state, job) == ("node rank 0", "node rank 130", "node rank 131", "node rank 256", "1 more")
    assert missing(state, job, most=5)[-1] == "node rank 299"


@pytest.mark.parametrize("few", [1, mappings.FEW])
def test_a_leaving_node_learns_how_many_others_reported(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "FEW", few)
    held = {node: Participant(INFO, rank) for rank, node in enumerate(NODES[:4])}
    state = State(complete=True, participants=held | {NodeId.placeholder(4): Participant(INFO, 4)})
    job = Settings("job", 1, 8)
    assert standing_without(state, NODES[0], job, placeholders_in(state)).others == 3
    assert standing_without(state, NODES[9], job, placeholders_in(state)).others == 4
