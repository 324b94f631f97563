"""A job preempted as a whole, against a twin that only counts."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.membership.state import (
    Close,
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
from tests.unit.membership.running import CAUSE, SEVEN, done, joined

JOB = Settings("job", 1, 4)
run = partial(done, job=JOB)
NODES = SEVEN[:4]
LATE = NodeId("late", 1, 0, "late")
PREEMPT = PreemptJob(60.0, "received SIGUSR2")


def running() -> State:
    state = joined(NODES, JOB)
    assert state.complete
    return state


CONSENTS = [Drain(0, needs_consent=True), Fail(0, CAUSE, 3)]
GONE = [Exit(Reason.LOST), Exit(Reason.DEPARTED)]
IDLE = [Drain(0), Preempt(0, 5.0), Restart(0), PREEMPT, Resize(NodeRange(1, 4)), Fail(7, CAUSE, 3), Succeed(7)]


@settings(max_examples=examples(1000))
@given(st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from([*CONSENTS, *GONE, *IDLE, Succeed(0)])), max_size=30))
def test_the_round_goes_on_until_all_are_done_and_then_the_job_ends(done: list[tuple[NodeId, Operation]]) -> None:
    state = run(running(), NODES[1], PREEMPT)
    there, finished, saved, lost = set(NODES), set[NodeId](), set[NodeId](), False
    for node, operation in done:
        over = there <= finished | saved
        if node in there and not over:
            if isinstance(operation, Exit):
                there.discard(node)
                lost = lost or node not in finished
            elif any(operation is each for each in CONSENTS):
                saved.add(node)
            elif isinstance(operation, Succeed) and operation.round == 0:
                finished.add(node)
        state = run(state, node, operation)
        if there <= finished | saved:
            break
        assert (state.round, state.complete, state.closed) == (0, True, False)
        assert set(state.participants) == there
        assert state.ledger == State().ledger, "nothing of it costs a restart"
    if not there <= finished | saved:
        return
    assert state.closed
    assert state.verdict is not None
    if there and not saved and not lost:
        assert state.verdict.outcome is Outcome.SUCCEEDED
        return
    assert (state.verdict.outcome, state.verdict.ending) == (Outcome.STOPPED, Ending.PREEMPTED)
    assert state.verdict.delegate == min(there, default=NODES[1]), "ranks were given in the order of names"


def test_what_was_agreed_to_before_is_asked_again() -> None:
    state = run(running(), NODES[3], Preempt(0, 5.0))
    for node in NODES[:3]:
        state = run(state, node, Drain(0, needs_consent=True))
    state = run(state, NODES[0], PREEMPT)
    assert not state.consents
    state = run(state, NODES[3], Drain(0, needs_consent=True))
    assert not state.closed


def test_an_operator_can_only_stop_it_sooner() -> None:
    verdict = run(run(running(), NODES[0], PREEMPT), NODES[0], Close(detail="ann stopped the job")).verdict
    assert verdict is not None
    assert verdict.ending is Ending.STOPPED
