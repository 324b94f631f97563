"""A preempted job, compared with a model that counts its nodes."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.membership.state import (
    Drain,
    Exit,
    Fail,
    NodeId,
    NodeRange,
    Operation,
    Outcome,
    Preempt,
    PreemptJob,
    Reason,
    Resize,
    Restart,
    Settings,
    State,
    Succeed,
)
from rallypoint.failures.cause import Ending
from tests.effort import examples
from tests.unit.membership.running import CAUSE, SEVEN, done, running

JOB = Settings("job", 1, 4)
run = partial(done, job=JOB)
NODES = SEVEN[:4]
PREEMPT = PreemptJob(60.0, "received SIGUSR2")


CONSENTS = [Drain(0, needs_consent=True), Fail(0, CAUSE, 3)]
GONE = [Exit(Reason.LOST), Exit(Reason.DEPARTED)]
IDLE = [Drain(0), Preempt(0, 5.0), Restart(0), PREEMPT, Resize(NodeRange(1, 4)), Fail(7, CAUSE, 3), Succeed(7)]


@settings(max_examples=examples(1000))
@given(st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from([*CONSENTS, *GONE, *IDLE, Succeed(0)])), max_size=30))
def test_the_job_ends_once_all_nodes_saved_finished_or_left(events: list[tuple[NodeId, Operation]]) -> None:
    state = run(running(NODES, JOB), NODES[1], PREEMPT)
    there, finished, saved, lost = set(NODES), set[NodeId](), set[NodeId](), False
    for node, operation in events:
        over = there <= finished | saved
        if node in there and not over:
            if isinstance(operation, Exit):
                there.discard(node)
                lost = lost or node not in finished
            elif any(operation is consent for consent in CONSENTS):
                saved.add(node)
            elif isinstance(operation, Succeed) and operation.round == 0:
                finished.add(node)
        state = run(state, node, operation)
        if there <= finished | saved:
            break
        assert (state.round, state.complete, state.closed) == (0, True, False)
        assert set(state.participants) == there
        assert state.ledger == State().ledger, "preemption costs no restart"
    if not there <= finished | saved:
        return
    assert state.closed
    assert state.verdict is not None
    if there and not saved and not lost:
        assert state.verdict.outcome is Outcome.SUCCEEDED
        return
    assert (state.verdict.outcome, state.verdict.ending) == (Outcome.STOPPED, Ending.PREEMPTED)
    assert state.verdict.delegate == min(there, default=NODES[1]), "ranks were given in the order of names"
