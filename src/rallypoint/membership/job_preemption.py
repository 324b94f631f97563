"""The end of a job that is preempted as a whole. Pure.

It ends when the workers of its round have saved. It has still succeeded if all of its nodes have by then; but a node
that has consented has not finished, and one that was lost or has failed never will.
"""

from __future__ import annotations

from rallypoint.failures.cause import Ending
from rallypoint.membership.operations import Action
from rallypoint.membership.state import NodeId, Outcome, Preemption, State, Verdict


def mark_job_preempted(action: Action, state: State, node: NodeId) -> State:
    """Ask the workers of the running round to save; without a running round there is nothing to save."""
    preempted = Preemption(node, action.seconds, whole_job=True, who=action.who, why=action.detail)
    after = state._replace(preempted=preempted, consents=frozenset())
    return after if after.complete else end_preempted_job(after)


def end_preempted_job(state: State) -> State:
    """All remaining nodes have saved. One of them will do what one node has to do for all."""
    said = state.preempted
    assert said is not None, "a job that was preempted knows by whom"
    in_order = sorted(state.participants.items(), key=lambda entry: entry[1].rank) if state.complete else ()
    delegate = next((node for node, _ in in_order if not node.is_placeholder), said.node)
    detail = f"{said.who} {said.why}"
    return state._replace(
        closed=True, verdict=Verdict(Outcome.STOPPED, detail=detail, ending=Ending.PREEMPTED, delegate=delegate)
    )
