"""The rows of the contract's tables (section 4.6), one by one, straight at the core."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import Sight, next_action
from rallypoint.rendezvous.effects import apply
from rallypoint.rendezvous.operations import Act, Close, Exit, Join, KeepAlive, Operation
from rallypoint.rendezvous.state import Abandoned, Member, NodeId, Participant, Settings, State

JOB = Settings("job", 2, 3, counts_beats=True)
ME, A, B, C = (NodeId(name, 1, 0) for name in ("me", "a", "b", "c"))
MEMBER = Member("default", 1, "host", 7000)
IN = Participant(MEMBER)
FULL = {A: IN, B: IN, C: IN}
JOIN = Join(MEMBER, deadline=100.0)
ADD = Act.ADD_TO_PARTICIPANTS

ROWS: list[tuple[str, Operation, State, Sight, Act]] = [
    ("exit: not known", Exit(), State(), Sight(0), Act.FINISH),
    ("exit: past deadline", Exit(deadline=1), State(participants={ME: IN}), Sight(2), Act.ERROR_TIMEOUT),
    ("exit: participant", Exit(), State(participants={ME: IN}), Sight(0), Act.REMOVE_FROM_PARTICIPANTS),
    ("1: closed, spare", JOIN, State(closed=True, redundancy_list={ME: MEMBER}), Sight(0), Act.GRACEFUL_EXIT),
    ("2: closed", JOIN, State(closed=True), Sight(0), Act.ERROR_CLOSED),
    (
        "3: spare, full, beat due",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        Sight(10, beat_at=4),
        Act.KEEP_ALIVE,
    ),
    ("4: spare, full", JOIN, State(participants=FULL, redundancy_list={ME: MEMBER}), Sight(10, beat_at=9), Act.SYNC),
    (
        "4: no timeout applies to spares",
        JOIN,
        State(participants=FULL, redundancy_list={ME: MEMBER}),
        Sight(500),
        Act.SYNC,
    ),
    (
        "5: spare, a seat is free",
        JOIN,
        State(participants={A: IN}, redundancy_list={ME: MEMBER}),
        Sight(0),
        Act.REMOVE_FROM_REDUNDANCY_LIST,
    ),
    ("6: complete and in", JOIN, State(complete=True, participants={ME: IN, A: IN}), Sight(500), Act.FINISH),
    (
        "7: late, in",
        JOIN,
        State(round=1, participants={ME: IN._replace(former=0)}, former={B: 1, C: 2}),
        Sight(101),
        Act.REMOVE_FROM_PARTICIPANTS,
    ),
    (
        "8: late, waiting",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}, wait_list={ME: MEMBER}),
        Sight(101),
        Act.REMOVE_FROM_WAIT_LIST,
    ),
    ("9: late", JOIN, State(), Sight(101), Act.ERROR_TIMEOUT),
    (
        "10: complete, room left",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}),
        Sight(0),
        Act.ADD_TO_WAIT_LIST,
    ),
    ("11: complete, full", JOIN, State(complete=True, participants=FULL), Sight(0), Act.ADD_TO_REDUNDANCY_LIST),
    (
        "12: last call over",
        JOIN,
        State(participants={ME: IN, A: IN}, last_call=1),
        Sight(31, last_call_at=1),
        Act.MARK_RENDEZVOUS_COMPLETE,
    ),
    ("13: forming", JOIN, State(participants={A: IN}), Sight(0), Act.ADD_TO_PARTICIPANTS),
    ("14: beat due", JOIN, State(participants={ME: IN}), Sight(5, beat_at=0), Act.KEEP_ALIVE),
    ("15: otherwise", JOIN, State(participants={ME: IN}), Sight(4, beat_at=0), Act.SYNC),
    ("15: last call runs", JOIN, State(participants={ME: IN, A: IN}, last_call=1), Sight(30, last_call_at=1), Act.SYNC),
    ("close: closed", Close(), State(closed=True), Sight(0), Act.FINISH),
    ("close: late", Close(deadline=1), State(), Sight(2), Act.ERROR_TIMEOUT),
    ("close", Close(), State(), Sight(0), Act.MARK_RENDEZVOUS_CLOSED),
    ("keep-alive: not due", KeepAlive(), State(participants={ME: IN}), Sight(4, beat_at=0), Act.FINISH),
    ("keep-alive: late", KeepAlive(deadline=3), State(participants={ME: IN}), Sight(5, beat_at=0), Act.ERROR_TIMEOUT),
    ("keep-alive", KeepAlive(), State(participants={ME: IN}), Sight(5, beat_at=0), Act.KEEP_ALIVE),
    # ours
    ("too few without a late one: it is over for all", JOIN, State(participants={ME: IN}), Sight(106), Act.ABANDON),
    ("also for those whose time is not over", JOIN, State(abandoned=Abandoned(1)), Sight(1), Act.ERROR_TIMEOUT),
    ("but not for who asks after that", JOIN._replace(since=1), State(abandoned=Abandoned(1)), Sight(1), ADD),
    (
        "late, in, and the last call runs: the round is sure to come",
        JOIN,
        State(participants={ME: IN, A: IN}, last_call=1),
        Sight(120, last_call_at=99),
        Act.SYNC,
    ),
    (
        "late and waiting behind a round: it goes alone",
        JOIN,
        State(complete=True, participants={A: IN, B: IN}, wait_list={ME: MEMBER}),
        Sight(101),
        Act.REMOVE_FROM_WAIT_LIST,
    ),
    (
        "seats of survivors are kept",
        JOIN,
        State(round=1, participants={A: IN}, former={B: 1, C: 2}),
        Sight(0),
        Act.ADD_TO_REDUNDANCY_LIST,
    ),
    (
        "re-formed: everybody alive is in, no last call",
        JOIN,
        State(round=1, participants={ME: IN._replace(former=0), A: IN}, last_call=1),
        Sight(2, last_call_at=1),
        Act.MARK_RENDEZVOUS_COMPLETE,
    ),
    (
        "re-formed: a survivor is awaited",
        JOIN,
        State(round=1, participants={ME: IN._replace(former=0), A: IN}, former={B: 2}, last_call=1),
        Sight(99, last_call_at=1),
        Act.SYNC,
    ),
    (
        "nobody of the last round is in: the last call counts",
        JOIN,
        State(round=1, participants={ME: IN, A: IN}, last_call=1),
        Sight(2, last_call_at=1),
        Act.SYNC,
    ),
]


@pytest.mark.parametrize(
    ("operation", "state", "sight", "act"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_row(operation: Operation, state: State, sight: Sight, act: Act) -> None:
    assert next_action(operation, state, ME, sight, JOB).act is act


@pytest.mark.parametrize(("operation", "state", "sight"), [row[1:4] for row in ROWS], ids=[row[0] for row in ROWS])
def test_asking_and_acting_change_no_state_in_place(operation: Operation, state: State, sight: Sight) -> None:
    before = repr(state)
    apply(next_action(operation, state, ME, sight, JOB), state, ME, JOB)
    assert repr(state) == before


def test_every_change_counts_as_a_beat_and_leaving_forgets_it() -> None:
    state = apply(next_action(JOIN, State(), ME, Sight(0), JOB), State(), ME, JOB)
    assert state.beats == {ME: 1}
    state = apply(next_action(KeepAlive(), state, ME, Sight(5, beat_at=0), JOB), state, ME, JOB)
    assert state.beats == {ME: 2}
    state = apply(next_action(Exit(), state, ME, Sight(6), JOB), state, ME, JOB)
    assert state.beats == {}
