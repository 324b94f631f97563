"""The rows of the tables in the contract (section 4.6), one by one."""

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
    Restart,
    Settings,
    State,
)

JOB = Settings("job", 2, 3, counts_heartbeats=True)
ME, A, B, C = (NodeId(name, 1, 0) for name in ("me", "a", "b", "c"))
MEMBER = NodeInfo("default", 1, "host", 7000)
IN = Participant(MEMBER)
FULL = {A: IN, B: IN, C: IN}
START, LATE = ClockView(0), ClockView(101)
ALONE = State(participants={ME: IN})
SPARE = State(participants=FULL, redundancy_list={ME: MEMBER})
RUNNING = State(complete=True, participants={A: IN, B: IN})
LAST_CALL = State(participants={ME: IN, A: IN}, last_call=1)
REJOINING = State(round=1, participants={ME: IN._replace(previous_rank=0)}, survivors={B: 1, C: 2})
JOIN = Join(MEMBER, deadline=100.0)

ROWS: list[tuple[str, Operation, State, ClockView, str | NoChange | Refusal]] = [
    ("exit: not known", Exit(), State(), START, NoChange.DONE),
    ("exit: past deadline", Exit(deadline=1), ALONE, ClockView(2), Refusal.TIMEOUT),
    ("exit: participant", Exit(), ALONE, START, "out"),
    ("1: closed, spare", JOIN, SPARE._replace(closed=True), START, Refusal.SPARE_NOT_NEEDED),
    ("2: closed", JOIN, State(closed=True), START, Refusal.CLOSED),
    ("3: spare, full, heartbeat due", JOIN, SPARE, ClockView(10, heartbeat_at=4), "heartbeat"),
    ("4: spare, full", JOIN, SPARE, ClockView(10, heartbeat_at=9), NoChange.WAIT),
    ("4: no timeout for spares", JOIN, SPARE, ClockView(500), NoChange.WAIT),
    ("5: spare, a place is free", JOIN, SPARE._replace(participants={A: IN}), START, "out"),
    ("6: complete and in", JOIN, ALONE._replace(complete=True), ClockView(500), NoChange.DONE),
    ("7: late, in", JOIN, REJOINING, LATE, "out"),
    ("8: late, waiting", JOIN, RUNNING._replace(wait_list={ME: MEMBER}), LATE, "out"),
    ("9: late", JOIN, State(), LATE, Refusal.TIMEOUT),
    ("10: complete, space left", JOIN, RUNNING, START, "waits"),
    ("11: complete, full", JOIN, RUNNING._replace(participants=FULL), START, "spare"),
    ("12: last call over", JOIN, LAST_CALL, ClockView(31, last_call_at=1), "complete"),
    ("13: forming", JOIN, State(participants={A: IN}), START, "participant"),
    ("14: heartbeat due", JOIN, ALONE, ClockView(5, heartbeat_at=0), "heartbeat"),
    ("15: otherwise", JOIN, ALONE, ClockView(4, heartbeat_at=0), NoChange.WAIT),
    ("15: last call", JOIN, LAST_CALL, ClockView(30, last_call_at=1), NoChange.WAIT),
    ("15: last call, new nodes only", JOIN, LAST_CALL._replace(round=1), ClockView(2, last_call_at=1), NoChange.WAIT),
    ("close: closed", Close(), State(closed=True), START, NoChange.DONE),
    ("close: late", Close(deadline=1), State(), ClockView(2), Refusal.TIMEOUT),
    ("close", Close(), State(), START, "closed"),
    ("keep-alive: not due", KeepLeaseAlive(), ALONE, ClockView(4, heartbeat_at=0), NoChange.DONE),
    ("keep-alive: late", KeepLeaseAlive(deadline=3), ALONE, ClockView(5, heartbeat_at=0), Refusal.TIMEOUT),
    ("keep-alive", KeepLeaseAlive(), ALONE, ClockView(5, heartbeat_at=0), "heartbeat"),
    ("restart: another round", Restart(0), RUNNING._replace(round=1), START, NoChange.DONE),
]


def change(before: State, after: State) -> str:
    """What the step changed for ME."""
    if after.complete and not before.complete:
        return "complete"
    if after.closed and not before.closed:
        return "closed"
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
    assert (change(state, after) if isinstance(after, State) else after) == act
    assert repr(state) == shown, "a state is immutable"


def test_changes_count_as_heartbeats_until_the_node_leaves() -> None:
    state, counts = State(), []
    for operation, view in ((JOIN, START), (KeepLeaseAlive(), ClockView(5, heartbeat_at=0)), (Exit(), ClockView(6))):
        after = step(operation, state, ME, view, JOB)
        assert isinstance(after, State)
        state = after
        counts.append(state.heartbeats.get(ME))
    assert counts == [1, 2, None]


def test_a_preempted_node_is_missing_from_the_next_round() -> None:
    preempted = PreemptionNotice(A, 5.0)
    state = State(complete=True, participants={A: IN, ME: IN}, preempted=preempted, consents=frozenset({A}))
    after = step(Drain(0, needs_consent=True), state, ME, START, JOB)
    assert isinstance(after, State)
    assert after.ended is not None
    assert (after.ended.reason, after.ended.missing_nodes) == (Reason.DRAINED, 1)
