"""The search for a cause over all nodes, at the coordinator: who is asked, and who gets the answers."""

from __future__ import annotations

import pytest

from rallypoint.control.membership.state import Fail, Settings
from rallypoint.control.protocol.messages import CauseClues, CauseSought, LeaveRequest, RoundEnded
from rallypoint.observe.watching import cause_search
from tests.unit.coordinator.floods import CAUSE
from tests.unit.coordinator.test_watching import Job

A, B, C = map(ord, "abc")
ASKED = CauseSought(0)


def _running(names: str = "abc") -> Job:
    job = Job(Settings("job", len(names), len(names), last_call_timeout=0.0, lease=1e6))
    for name in names:
        job.node(name)
    return job


def _clues(*ranks: int) -> CauseClues:
    return CauseClues(0, (("still in all_reduce (train.py:41)", ranks),))


def test_all_others_are_asked_and_the_answers_go_to_the_node_that_asks() -> None:
    job = _running()
    assert sorted(job.hears("b", ASKED)) == [(A, ASKED), (C, ASKED)]
    assert job.hears("a", _clues(0)) == [(B, _clues(0))]
    assert job.hears("a", _clues(0)) == [], "a node answers once"
    assert job.hears("c", _clues(2)) == [(B, _clues(2))]


def test_one_node_asks_in_a_round() -> None:
    job = _running()
    job.hears("b", ASKED)
    assert job.hears("c", ASKED) == []
    assert job.hears("c", _clues(2)) == [(B, _clues(2))], "it has been asked too"
    assert job.hears("b", CauseSought(7)) == [], "no such round"
    assert job.hears("b", _clues(1)) == [], "it asks itself"


def test_what_comes_after_the_round_or_for_a_node_that_has_gone_is_dropped() -> None:
    job = _running()
    job.hears("b", ASKED)
    job.hears("b", LeaveRequest())
    assert job.hears("a", _clues(0)) == []
    job = _running()
    assert [kind for _, kind in job.hears("a", Fail(0, CAUSE, 1)) if isinstance(kind, RoundEnded)]
    assert job.hears("b", ASKED) == []


def test_of_a_large_job_some_answers_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause_search, "MOST_ANSWERS", 1)
    job = _running()
    job.hears("b", ASKED)
    assert [bool(job.hears(name, _clues(ord(name) - A))) for name in "ac"] == [True, False]
