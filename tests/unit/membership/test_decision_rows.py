"""The rows of the contract's tables (section 4.6), one by one, straight at the core."""

from __future__ import annotations

import pytest

from rallypoint.membership.decisions import ClockView, next_action
from rallypoint.membership.operations import ActionKind, Close, Exit, Join, KeepLeaseAlive, Operation
from rallypoint.membership.state import AbandonedRendezvous, NodeId, NodeInfo, Participant, Settings, State
from rallypoint.membership.transitions import apply

JOB = Settings("job", 2, 3, counts_heartbeats=True)
ME, A, B, C = (NodeId(name, 1, 0) for name in ("me", "a", "b", "c"))
MEMBER = NodeInfo("default", 1, "host", 7000)
IN = Participant(MEMBER)
FULL = {A: IN, B: IN, C: IN}
JOIN = Join(MEMBER, deadline=100.0)
ADD = ActionKind.ADD_TO_PARTICIPANTS

ROWS: list[tuple[str, Operation, State, ClockView, ActionKind]] = [
    ("exit: not known", Exit(), State(), ClockView(0), ActionKind.FINISH),
    ("exit: past deadline", Exit(deadline=1), State(participants={ME: IN}), ClockView(2), ActionKind.ERROR_TIMEOUT),
    ("exit: participant", Exit(), State(participants={ME: IN}), ClockView(0), ActionKind.REMOVE_FROM_PARTICIPANTS),
    (
        "1: closed, spare",
        JOIN,
        State(closed=True, redundancy_list={ME: MEMBER}),
        ClockView(0),
        ActionKind.GRACEFUL_EXIT,
    ),
    ("2: closed", JOIN, State(closed=True), ClockView(0), ActionKind.ERROR_CLOSED),
    (
        "3: spare, full, heartbeat due",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        ClockView(10, heartbeat_at=4),
        ActionKind.KEEP_ALIVE,
    ),
    (
        "4: spare, full",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        ClockView(10, heartbeat_at=9),
        ActionKind.SYNC,
    ),
    (
        "4: no timeout applies to spares",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        ClockView(500),
        ActionKind.SYNC,
    ),
    (
        "5: spare, a place is free",
        JOIN,
        State(participants={A: IN}, redundancy_list={ME: MEMBER}),
        ClockView(0),
        ActionKind.REMOVE_FROM_REDUNDANCY_LIST,
    ),
    ("6: complete and in", JOIN, State(complete=True, participants={ME: IN, A: IN}), ClockView(500), ActionKind.FINISH),
    (
        "7: late, in",
        JOIN,
        State(round=1, participants={ME: IN._replace(previous_rank=0)}, survivors={B: 1, C: 2}),
        ClockView(101),
        ActionKind.REMOVE_FROM_PARTICIPANTS,
    ),
    (
        "8: late, waiting",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}, wait_list={ME: MEMBER}),
        ClockView(101),
        ActionKind.REMOVE_FROM_WAIT_LIST,
    ),
    ("9: late", JOIN, State(), ClockView(101), ActionKind.ERROR_TIMEOUT),
    (
        "10: complete, space left",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}),
        ClockView(0),
        ActionKind.ADD_TO_WAIT_LIST,
    ),
    (
        "11: complete, full",
        JOIN,
        State(complete=True, participants=FULL),
        ClockView(0),
        ActionKind.ADD_TO_REDUNDANCY_LIST,
    ),
    (
        "12: last call over",
        JOIN,
        State(participants={ME: IN, A: IN}, last_call=1),
        ClockView(31, last_call_at=1),
        ActionKind.MARK_RENDEZVOUS_COMPLETE,
    ),
    ("13: forming", JOIN, State(participants={A: IN}), ClockView(0), ActionKind.ADD_TO_PARTICIPANTS),
    ("14: heartbeat due", JOIN, State(participants={ME: IN}), ClockView(5, heartbeat_at=0), ActionKind.KEEP_ALIVE),
    ("15: otherwise", JOIN, State(participants={ME: IN}), ClockView(4, heartbeat_at=0), ActionKind.SYNC),
    (
        "15: last call runs",
        JOIN,
        State(participants={ME: IN, A: IN}, last_call=1),
        ClockView(30, last_call_at=1),
        ActionKind.SYNC,
    ),
    ("close: closed", Close(), State(closed=True), ClockView(0), ActionKind.FINISH),
    ("close: late", Close(deadline=1), State(), ClockView(2), ActionKind.ERROR_TIMEOUT),
    ("close", Close(), State(), ClockView(0), ActionKind.MARK_RENDEZVOUS_CLOSED),
    (
        "keep-alive: not due",
        KeepLeaseAlive(),
        State(participants={ME: IN}),
        ClockView(4, heartbeat_at=0),
        ActionKind.FINISH,
    ),
    (
        "keep-alive: late",
        KeepLeaseAlive(deadline=3),
        State(participants={ME: IN}),
        ClockView(5, heartbeat_at=0),
        ActionKind.ERROR_TIMEOUT,
    ),
    ("keep-alive", KeepLeaseAlive(), State(participants={ME: IN}), ClockView(5, heartbeat_at=0), ActionKind.KEEP_ALIVE),
    # ours
    (
        "too few without a late one: it is over for all",
        JOIN,
        State(participants={ME: IN}),
        ClockView(106),
        ActionKind.ABANDON,
    ),
    (
        "also for those whose time is not over",
        JOIN,
        State(abandoned=AbandonedRendezvous(1)),
        ClockView(1),
        ActionKind.ERROR_TIMEOUT,
    ),
    (
        "but not for who asks after that",
        JOIN._replace(since=1),
        State(abandoned=AbandonedRendezvous(1)),
        ClockView(1),
        ADD,
    ),
    (
        "late, in, and the last call runs: the round is sure to come",
        JOIN,
        State(participants={ME: IN, A: IN}, last_call=1),
        ClockView(120, last_call_at=99),
        ActionKind.SYNC,
    ),
    (
        "late and waiting behind a round: it goes alone",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}, wait_list={ME: MEMBER}),
        ClockView(101),
        ActionKind.REMOVE_FROM_WAIT_LIST,
    ),
    (
        "places of survivors are kept",
        JOIN,
        State(round=1, participants={A: IN}, survivors={B: 1, C: 2}),
        ClockView(0),
        ActionKind.ADD_TO_REDUNDANCY_LIST,
    ),
    (
        "re-formed: everybody alive is in, no last call",
        JOIN,
        State(round=1, participants={ME: IN._replace(previous_rank=0), A: IN}, last_call=1),
        ClockView(2, last_call_at=1),
        ActionKind.MARK_RENDEZVOUS_COMPLETE,
    ),
    (
        "re-formed: a survivor is awaited",
        JOIN,
        State(round=1, participants={ME: IN._replace(previous_rank=0), A: IN}, survivors={B: 2}, last_call=1),
        ClockView(99, last_call_at=1),
        ActionKind.SYNC,
    ),
    (
        "nobody of the last round is in: the last call counts",
        JOIN,
        State(round=1, participants={ME: IN, A: IN}, last_call=1),
        ClockView(2, last_call_at=1),
        ActionKind.SYNC,
    ),
]


@pytest.mark.parametrize(("operation", "state", "view", "act"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_row(operation: Operation, state: State, view: ClockView, act: ActionKind) -> None:
    assert next_action(operation, state, ME, view, JOB).kind is act


@pytest.mark.parametrize(("operation", "state", "view"), [row[1:4] for row in ROWS], ids=[row[0] for row in ROWS])
def test_asking_and_acting_change_no_state_in_place(operation: Operation, state: State, view: ClockView) -> None:
    before = repr(state)
    apply(next_action(operation, state, ME, view, JOB), state, ME, JOB)
    assert repr(state) == before


def test_nobody_has_consented_once_nobody_waits_any_more() -> None:
    state = State(complete=True, participants=FULL, wait_list={ME: MEMBER}, consents=frozenset({A}))
    assert apply(next_action(Exit(), state, ME, ClockView(0), JOB), state, ME, JOB).consents == frozenset()


def test_every_change_counts_as_a_heartbeat_and_leaving_forgets_it() -> None:
    state = apply(next_action(JOIN, State(), ME, ClockView(0), JOB), State(), ME, JOB)
    assert state.heartbeats == {ME: 1}
    state = apply(next_action(KeepLeaseAlive(), state, ME, ClockView(5, heartbeat_at=0), JOB), state, ME, JOB)
    assert state.heartbeats == {ME: 2}
    state = apply(next_action(Exit(), state, ME, ClockView(6), JOB), state, ME, JOB)
    assert state.heartbeats == {}
