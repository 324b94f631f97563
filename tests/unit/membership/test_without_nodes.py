"""Removing nodes at once leaves the same state as removing them one by one."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.membership.many_gone import without_nodes
from rallypoint.control.membership.state import (
    Close,
    Drain,
    Exit,
    Fail,
    Join,
    NodeId,
    Operation,
    PreemptJob,
    Reason,
    Settings,
    Succeed,
)
from tests.effort import examples
from tests.unit.membership.running import CAUSE, INFO, SEVEN, done, joined

JOB = Settings("job", 2, 4)
run = partial(done, job=JOB)
ROUNDS = st.integers(0, 3)
OPERATIONS = st.one_of(
    st.just(Join(INFO)),
    st.builds(Succeed, ROUNDS),
    st.builds(Fail, ROUNDS, st.just(CAUSE), st.just(9)),
    st.builds(Drain, ROUNDS, st.booleans()),
    st.just(PreemptJob(60.0, "received SIGUSR2")),
    st.just(Exit(Reason.LOST)),
    st.just(Close()),
)


@settings(max_examples=examples(2000))
@given(
    st.lists(st.tuples(st.sampled_from(SEVEN), OPERATIONS), max_size=40), st.lists(st.sampled_from(SEVEN), unique=True)
)
def test_removing_at_once_equals_removing_one_by_one(
    before: list[tuple[NodeId, Operation]], chosen: list[NodeId]
) -> None:
    state = joined(SEVEN[:4], JOB)
    for node, operation in before:
        state = run(state, node, operation)
    ends_round = state.participants.keys() - (state.succeeded ^ state.participants.keys() if state.is_preempted else ())
    gone = [node for node in chosen if not (state.complete and node in ends_round)]
    one_by_one = state
    for node in gone:
        one_by_one = run(one_by_one, node, Exit(Reason.LOST))
    at_once = without_nodes(state, gone, Reason.LOST, JOB)
    if at_once.closed and not state.closed:  # a preempted job ends at the last one, with other nodes left
        assert one_by_one.closed
        assert at_once.verdict is not None
        assert one_by_one.verdict is not None
        one_by_one = one_by_one._replace(removed=at_once.removed, verdict=at_once.verdict, consents=at_once.consents)
    assert at_once == one_by_one
