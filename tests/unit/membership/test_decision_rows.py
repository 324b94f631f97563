"""The rows of the contract's tables (section 4.6), one by one, straight at the core."""

from __future__ import annotations

import pytest

from rallypoint.control.membership.rules import ClockView, step
from rallypoint.control.membership.state import (
    Close,
    Drain,
    Exit,
    Join,
    KeepLeaseAlive,
    NoChange,
    NodeId,
    NodeInfo,
    Operation,
    Participant,
    PreemptionNotice,
    Reason,
    Refusal,
    RemovedNode,
    Restart,
    Settings,
    State,
)

JOB = Settings("job", 2, 3, counts_heartbeats=True)
ME, A, B, C = (NodeId(name, 1, 0) for name in ("me", "a", "b", "c"))
MEMBER = NodeInfo("default", 1, "host", 7000)
IN = Participant(MEMBER)
FULL = {A: IN, B: IN, C: IN}
JOIN = Join(MEMBER, deadline=100.0)

ROWS: list[tuple[str, Operation, State, ClockView, str | NoChange | Refusal]] = [
    ("exit: not known", Exit(), State(), ClockView(0), NoChange.DONE),
    ("exit: past deadline", Exit(deadline=1), State(participants={ME: IN}), ClockView(2), Refusal.TIMEOUT),
    ("exit: participant", Exit(), State(participants={ME: IN}), ClockView(0), "out"),
    (
        "1: closed, spare",
        JOIN,
        State(closed=True, redundancy_list={ME: MEMBER}),
        ClockView(0),
        Refusal.SPARE_NOT_NEEDED,
    ),
    ("2: closed", JOIN, State(closed=True), ClockView(0), Refusal.CLOSED),
    (
        "3: spare, full, heartbeat due",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        ClockView(10, heartbeat_at=4),
        "heartbeat",
    ),
    (
        "4: spare, full",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        ClockView(10, heartbeat_at=9),
        NoChange.WAIT,
    ),
    (
        "4: no timeout applies to spares",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        ClockView(500),
        NoChange.WAIT,
    ),
    (
        "5: spare, a place is free",
        JOIN,
        State(participants={A: IN}, redundancy_list={ME: MEMBER}),
        ClockView(0),
        "out",
    ),
    ("6: complete and in", JOIN, State(complete=True, participants={ME: IN, A: IN}), ClockView(500), NoChange.DONE),
    (
        "7: late, in",
        JOIN,
        State(round=1, participants={ME: IN._replace(previous_rank=0)}, survivors={B: 1, C: 2}),
        ClockView(101),
        "out",
    ),
    (
        "8: late, waiting",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}, wait_list={ME: MEMBER}),
        ClockView(101),
        "out",
    ),
    ("9: late", JOIN, State(), ClockView(101), Refusal.TIMEOUT),
    (
        "10: complete, space left",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}),
        ClockView(0),
        "waits",
    ),
    (
        "11: complete, full",
        JOIN,
        State(complete=True, participants=FULL),
        ClockView(0),
        "spare",
    ),
    (
        "12: last call over",
        JOIN,
        State(participants={ME: IN, A: IN}, last_call=1),
        ClockView(31, last_call_at=1),
        "complete",
    ),
    ("13: forming", JOIN, State(participants={A: IN}), ClockView(0), "participant"),
    ("14: heartbeat due", JOIN, State(participants={ME: IN}), ClockView(5, heartbeat_at=0), "heartbeat"),
    ("15: otherwise", JOIN, State(participants={ME: IN}), ClockView(4, heartbeat_at=0), NoChange.WAIT),
    (
        "15: last call runs",
        JOIN,
        State(participants={ME: IN, A: IN}, last_call=1),
        ClockView(30, last_call_at=1),
        NoChange.WAIT,
    ),
    ("close: closed", Close(), State(closed=True), ClockView(0), NoChange.DONE),
    ("close: late", Close(deadline=1), State(), ClockView(2), Refusal.TIMEOUT),
    ("close", Close(), State(), ClockView(0), "closed"),
    (
        "keep-alive: not due",
        KeepLeaseAlive(),
        State(participants={ME: IN}),
        ClockView(4, heartbeat_at=0),
        NoChange.DONE,
    ),
    (
        "keep-alive: late",
        KeepLeaseAlive(deadline=3),
        State(participants={ME: IN}),
        ClockView(5, heartbeat_at=0),
        Refusal.TIMEOUT,
    ),
    ("keep-alive", KeepLeaseAlive(), State(participants={ME: IN}), ClockView(5, heartbeat_at=0), "heartbeat"),
    # ours, beside what the transcripts show
    (
        "restart: another round",
        Restart(0),
        State(round=1, complete=True, participants=FULL),
        ClockView(0),
        NoChange.DONE,
    ),
    (
        "nobody of the last round is in: the last call counts",
        JOIN,
        State(round=1, participants={ME: IN, A: IN}, last_call=1),
        ClockView(2, last_call_at=1),
        NoChange.WAIT,
    ),
]


def what(before: State, after: State) -> str:
    """What a step of mine has done."""
    if after.complete and not before.complete:
        return "complete"
    if after.closed and not before.closed:
        return "closed"
    if after.abandoned != before.abandoned:
        return "abandoned"
    if place(after) != place(before):
        return place(after)
    assert after == before._replace(heartbeats=after.heartbeats)
    return "heartbeat"


def place(state: State) -> str:
    lists = {"participant": state.participants, "waits": state.wait_list, "spare": state.redundancy_list}
    return next((name for name, nodes in lists.items() if ME in nodes), "out")


@pytest.mark.parametrize(("operation", "state", "view", "act"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_row(operation: Operation, state: State, view: ClockView, act: str | NoChange | Refusal) -> None:
    shown = repr(state)
    after = step(operation, state, ME, view, JOB)
    assert (what(state, after) if isinstance(after, State) else after) == act
    assert repr(state) == shown, "no state is changed in place"


def stepped(operation: Operation, state: State, view: ClockView) -> State:
    after = step(operation, state, ME, view, JOB)
    assert isinstance(after, State)
    return after


def test_a_node_that_has_left_may_say_later_that_its_workers_have_ended_with_0() -> None:
    gone = RemovedNode(ME, "me", Reason.DEPARTED)
    state = State(participants={A: IN}, removed=(gone, gone._replace(node=A)))
    after = stepped(Exit(ended_with_0=True), state, ClockView(0))
    assert after == state._replace(removed=(gone._replace(ended_with_0=True), gone._replace(node=A)))
    assert step(Exit(ended_with_0=True), after, ME, ClockView(0), JOB) is NoChange.DONE
    assert step(Exit(), after, ME, ClockView(0), JOB) is NoChange.DONE
    assert step(Exit(ended_with_0=True), State(), ME, ClockView(0), JOB) is NoChange.DONE


def test_every_change_counts_as_a_heartbeat_and_leaving_forgets_it() -> None:
    state = stepped(JOIN, State(), ClockView(0))
    assert state.heartbeats == {ME: 1}
    state = stepped(KeepLeaseAlive(), state, ClockView(5, heartbeat_at=0))
    assert state.heartbeats == {ME: 2}
    assert stepped(Exit(), state, ClockView(6)).heartbeats == {}


def test_a_preempted_node_is_missing_from_the_next_round() -> None:
    state = State(
        complete=True, participants={A: IN, ME: IN}, preempted=PreemptionNotice(A, 5.0), consents=frozenset({A})
    )
    ended = stepped(Drain(0, needs_consent=True), state, ClockView(0)).ended
    assert ended is not None
    assert (ended.reason, ended.missing_nodes) == (Reason.DRAINED, 1)
