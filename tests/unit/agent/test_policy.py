"""What an agent does about what happens: the table, and its laws under any sequence of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.agent.policy import (
    AnnounceFailure,
    AnnounceSuccess,
    Depart,
    Drain,
    End,
    Event,
    Finish,
    GiveUp,
    Join,
    Phase,
    SignalArrived,
    Start,
    Status,
    Step,
    Stop,
    Tell,
    WorkersFailed,
    WorkersSucceeded,
    decide,
)
from rallypoint.failures.cause import Cause
from rallypoint.ranks.assign import NodeRanks
from rallypoint.rendezvous.messages import (
    Beat,
    JobEnded,
    JoinRefused,
    LinkLost,
    NodesWaiting,
    Placed,
    Placement,
    Progress,
    Refusal,
    RoundEnded,
)
from rallypoint.rendezvous.state import Outcome, Reason, RoundEnd, Verdict

CAUSE = Cause(1, 1, "host", 42, -9, "Signal 9 (SIGKILL)", "", 0.0, "")


def placed(round_: int) -> Placed:
    return Placed(Placement(round_, 0, 1, NodeRanks(0, 1, 0, 1), "127.0.0.1", 7000, 0))


def ended(round_: int) -> RoundEnded:
    return RoundEnded(RoundEnd(round_, Reason.FAILURE, "node", CAUSE))


SUCCEEDED = JobEnded(Verdict(Outcome.SUCCEEDED))
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(placed, st.integers(0, 3)),
    st.builds(ended, st.integers(0, 3)),
    st.builds(NodesWaiting, st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from(
        [
            SUCCEEDED,
            JobEnded(Verdict(Outcome.FAILED, CAUSE)),
            JoinRefused(Refusal.TIMEOUT, "1 of 2"),
            LinkLost("gone"),
            Progress(0, False, 1, 2, 2, (), False),
            Beat(),
            WorkersSucceeded(),
            WorkersFailed(CAUSE),
            SignalArrived(15),
        ]
    ),
)
LAST = (End, GiveUp, Depart, Finish)


def run(events: list[Event]) -> list[Step]:
    status = Status()
    steps: list[Step] = []
    for event in events:
        status, now = decide(status, event)
        steps += now
    return steps


def test_one_failure_from_the_exit_to_the_new_workers() -> None:
    steps = run([placed(0), WorkersFailed(CAUSE), ended(0), placed(1)])
    assert [type(step) for step in steps] == [Start, AnnounceFailure, Tell, Join, Stop, Start]


def test_success_waits_for_the_verdict() -> None:
    assert [type(step) for step in run([placed(0), WorkersSucceeded()])] == [Start, AnnounceSuccess]
    assert [type(step) for step in run([placed(0), WorkersSucceeded(), SUCCEEDED])] == [Start, AnnounceSuccess, End]


def test_a_failure_elsewhere_takes_a_finished_node_back_in() -> None:
    steps = run([placed(0), WorkersSucceeded(), ended(0), placed(1)])
    assert [type(step) for step in steps] == [Start, AnnounceSuccess, Tell, Join, Stop, Start]


def test_a_round_that_went_by_unseen_is_followed_by_another_join() -> None:
    assert [type(step) for step in run([ended(0), ended(0), placed(1)])] == [Join, Start]
    assert [type(step) for step in run([placed(0), ended(0), ended(1), placed(2)])][-2:] == [Join, Start]


def test_newcomers_drain_the_round_that_they_wait_behind() -> None:
    assert isinstance(run([placed(2), NodesWaiting(2, 1)])[-1], Drain)
    assert [type(step) for step in run([placed(2), NodesWaiting(1, 1), NodesWaiting(2, 0)])] == [Start]


def test_what_the_person_is_told_names_rank_host_and_how() -> None:
    told = next(step for step in run([placed(0), ended(0)]) if isinstance(step, Tell))
    assert told.loud
    assert told.text == (
        "round 0 is over: rank 1 failed on host (exit code -9, SIGKILL): Signal 9 (SIGKILL); the workers are restarted"
    )


def test_a_lost_control_plane_is_no_failure_of_workers_that_have_succeeded() -> None:
    assert [type(step) for step in run([placed(0), WorkersSucceeded(), LinkLost("gone")])][-2:] == [Tell, Finish]
    assert [type(step) for step in run([placed(0), LinkLost("gone")])][-1:] == [GiveUp]


@settings(max_examples=500)
@given(st.lists(EVENTS, max_size=30))
def test_laws(events: list[Event]) -> None:
    status = Status()
    running = last = False
    steps: list[Step] = []
    for event in events:
        before = status
        status, now = decide(status, event)
        assert not (last and now), "something was done after the end"
        for place, step in enumerate(now):
            if isinstance(step, Start):
                assert not running, "started before the workers of the round before were gone"
                assert isinstance(event, Placed)
                running = True
            if isinstance(step, Stop):
                assert any(isinstance(each, Join) for each in now[:place]), "stopped before asking again"
                running = False
            if isinstance(step, LAST):
                assert status.phase is Phase.ENDED
                last = True
        if isinstance(event, RoundEnded) and event.end.round != before.round:
            missed = before.phase is Phase.FORMING and event.end.round > before.round
            assert (status, now) == ((Status(Phase.FORMING, event.end.round), (Join(),)) if missed else (before, ()))
        steps += now
    assert sum(isinstance(step, LAST) for step in steps) <= 1
