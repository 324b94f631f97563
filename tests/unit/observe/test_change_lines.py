"""Who follows a job without a screen reads one line a change, and no line for what has not changed."""

from __future__ import annotations

import time

from rallypoint.observe.status import ChangeLines
from rallypoint.protocol.observation import Phase, Snapshot
from tests.unit.observe.snapshots import event, node, snapshot

NOW = time.mktime((2026, 1, 2, 14, 3, 59, 0, 0, -1))


def told(*snapshots: Snapshot) -> list[list[str]]:
    changes = ChangeLines()
    return [list(changes.lines(each, NOW)) for each in snapshots]


def test_who_begins_to_watch_is_told_how_things_stand_and_not_the_past() -> None:
    (first,) = told(snapshot())
    assert first == ["14:03:59 job job, round 4: running for 1m01s; restarts: 1 failure; 2 left"]


def test_what_has_not_changed_is_not_said_again() -> None:
    later = snapshot(phase_for=90.0, nodes=2)._replace(nodes=(node(0, silent_for=2.0), node(1)))
    assert told(snapshot(), later)[1] == []


def test_an_event_is_a_line_with_its_time() -> None:
    news = (*snapshot().events, event(3, "round 4 ended: ann@login asks", seconds_ago=9.0))
    waiting = snapshot(Phase.WAITING, nodes=1, events=news, missing=1, expected=("n1 (rank 1)",), phase_for=9.0)
    joined = waiting._replace(phase=Phase.FORMING, nodes=(node(0), node(1)), missing=0, expected=())
    lines = told(snapshot(), waiting, waiting, joined)
    assert lines[1] == [
        "14:03:50 round 4 ended: ann@login asks",
        "14:03:59 waiting for 9.0s: 1 of 2 nodes, 1 missing (n1 (rank 1))",
    ]
    assert lines[2] == []
    assert lines[3] == ["14:03:59 forming for 9.0s: 2 of at most 4 nodes"]


def test_the_end_is_told_once() -> None:
    end = (*snapshot().events, event(3, "the job has stopped: ann has stopped the job", seconds_ago=0.0))
    stopped = snapshot(Phase.STOPPED, events=end, detail="the job has stopped: ann has stopped the job")
    assert told(snapshot(), stopped)[1] == ["14:03:59 the job has stopped: ann has stopped the job"]


def test_events_of_another_coordinator_are_news_whatever_their_numbers() -> None:
    another = snapshot(incarnation="another", events=(event(1, "another coordinator has taken over"),))
    assert told(snapshot(), another)[1] == ["14:03:58 another coordinator has taken over"]
