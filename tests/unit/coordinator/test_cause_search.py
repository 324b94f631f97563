"""The coordinator's part in the search for a cause on all nodes."""

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


def test_answers_of_all_others_go_to_the_searching_node() -> None:
    job = _running()
    assert sorted(job.hears("b", ASKED)) == [(A, ASKED), (C, ASKED)]
    assert job.hears("a", _clues(0)) == [(B, _clues(0))]
    assert job.hears("a", _clues(0)) == [], "a node answers once"
    assert job.hears("c", _clues(2)) == [(B, _clues(2))]


def test_one_node_searches_in_a_round() -> None:
    job = _running()
    assert job.hears("b", CauseSought(7)) == [], "no such round"
    job.hears("b", ASKED)
    assert job.hears("c", ASKED) == []
    assert job.hears("c", _clues(2)) == [(B, _clues(2))], "it was asked too"
    assert job.hears("b", _clues(1)) == [], "it searches itself"
    job.hears("b", LeaveRequest())
    assert job.hears("a", _clues(0)) == []


def test_a_search_ends_with_the_round() -> None:
    job = _running()
    assert RoundEnded in [type(notice) for _, notice in job.hears("a", Fail(0, CAUSE, 1))]
    assert job.hears("b", ASKED) == []


def test_a_large_job_passes_on_some_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause_search, "MOST_ANSWERS", 1)
    job = _running()
    job.hears("b", ASKED)
    assert [bool(job.hears(name, _clues(ord(name) - A))) for name in "ac"] == [True, False]
