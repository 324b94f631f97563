"""When a round hangs, compared with a model that keeps a set."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.membership.endings import hang_began, is_hung
from rallypoint.control.membership.state import (
    Close,
    Exit,
    Fail,
    Join,
    NodeId,
    Operation,
    PreemptionNotice,
    Reason,
    ReportQuiet,
    Restart,
    Settings,
    State,
    Succeed,
)
from tests.effort import examples
from tests.unit.membership.running import CAUSE, INFO, SEVEN, done, running

JOB = Settings("job", 1, 3)
run = partial(done, job=JOB)
NODES = SEVEN[:3]


def test_a_lost_node_of_a_preempted_job_is_no_hang() -> None:
    state = running(NODES, JOB)._replace(preempted=PreemptionNotice(NODES[0], 30.0, whole_job=True))
    state = run(run(state, NODES[1], ReportQuiet(0)), NODES[2], ReportQuiet(0))
    alone = state._replace(participants={node: each for node, each in state.participants.items() if node != NODES[0]})
    assert all(node in alone.quiet for node in alone.participants)
    assert not hang_began(state, alone)


class Model:
    """The quiet nodes of the current round."""

    def __init__(self) -> None:
        self.round = 0
        self.quiet: set[NodeId] = set()

    def hangs(self, state: State) -> bool:
        if state.round != self.round or not state.complete:
            self.round, self.quiet = state.round, set()
        return not state.closed and bool(state.participants) and all(node in self.quiet for node in state.participants)


OPERATIONS = st.one_of(
    st.builds(ReportQuiet, st.integers(0, 3), st.booleans()),
    st.builds(Succeed, st.integers(0, 3)),
    st.builds(Fail, st.integers(0, 3), st.just(CAUSE), st.just(9)),
    st.builds(Restart, st.integers(0, 3)),
    st.just(Join(INFO)),
    st.just(Exit(Reason.LOST)),
    st.just(Close()),
)
HAPPEN = st.lists(st.tuples(st.sampled_from(NODES), OPERATIONS), max_size=40)
QUIET = st.lists(st.tuples(st.sampled_from(NODES), st.builds(ReportQuiet, st.just(0))), max_size=6)


@settings(max_examples=examples(400))
@given(QUIET, HAPPEN)
def test_a_round_hangs_when_all_its_nodes_are_quiet(
    first: list[tuple[NodeId, Operation]], then: list[tuple[NodeId, Operation]]
) -> None:
    state, model = running(NODES, JOB), Model()
    for node, operation in first + then:
        before = state
        state = run(state, node, operation)
        hung_before = model.hangs(before)
        if isinstance(operation, ReportQuiet) and before.runs(node, operation.round):
            (model.quiet.add if operation.quiet else model.quiet.discard)(node)
        assert is_hung(state) == model.hangs(state)
        if state.round == before.round:
            assert hang_began(before, state) == (model.hangs(state) and not hung_before)
        assert state.quiet <= set(NODES)
