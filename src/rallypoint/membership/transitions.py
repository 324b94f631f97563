"""The effect of each action on the state: the second of the two functions of `decisions`, which has the laws.

    apply(action, state, node, settings) -> State

Nothing is decided here, except necessary consequences: a round that has max nodes is complete, and a round whose last
running node has succeeded ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.light_typing import TypeVar
from rallypoint.failures.cause import Ending, Restarts
from rallypoint.membership.operations import Action, ActionKind
from rallypoint.membership.state import (
    FailureStreak,
    Ledger,
    NodeId,
    NodeInfo,
    Outcome,
    Participant,
    Preemption,
    Reason,
    RemovedNode,
    RoundEnd,
    Settings,
    State,
    Verdict,
    known_to,
    name_of,
)
from rallypoint.ranks.assign import assign_group_ranks

V = TypeVar("V")

_MAX_REMOVED = 4
"""The number of removed nodes that are kept."""
_MAX_ROLES = 16
"""The number of roles whose programs are kept."""
_LEDGER_FIELDS = {
    Reason.FAILURE: "failures",
    Reason.LOST: "lost",
    Reason.DEPARTED: "departed",
    Reason.DRAINED: "drained",
    Reason.REQUESTED: "requested",
}
"""The counters for reasons of a round's end; other reasons are not counted."""


def apply(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    """The state after `action` of `node`. Actions that end an operation, and SYNC, leave it unchanged."""
    effect = _EFFECTS.get(action.kind)
    if effect is None:
        return state
    after = effect(action, state, node, settings)
    if settings.counts_heartbeats and after.knows(node):
        return after._replace(heartbeats={**after.heartbeats, node: after.heartbeats.get(node, 0) + 1})
    return after._replace(heartbeats=_without(after.heartbeats, node)) if node in after.heartbeats else after


def without_nodes(state: State, nodes: Sequence[NodeId], reason: Reason, settings: Settings) -> State:
    """The state after all these nodes were removed, in time that is linear in their number and that of all nodes.

    It is what `apply` would make of their removal one after the other. None is a participant of a complete round, since
    the first of those ends the round, except in a job that is preempted.
    """
    gone = frozenset(nodes)
    counted = state.survivors if state.closed else {**state.participants, **state.survivors}
    held = [each for each in nodes if each in counted][:_MAX_REMOVED]
    removed = tuple(RemovedNode(each, name_of(state, each), reason) for each in held)
    after = state._replace(
        participants=_without_all(state.participants, gone),
        wait_list=_without_all(state.wait_list, gone),
        redundancy_list=_without_all(state.redundancy_list, gone),
        survivors=_without_all(state.survivors, gone),
        heartbeats=_without_all(state.heartbeats, gone),
        removed=(*state.removed, *removed)[:_MAX_REMOVED],
    )
    if state.wait_list and not after.wait_list and not after.preempted:
        after = after._replace(consents=frozenset())
    if state.closed or len(after.participants) == len(state.participants):
        return after
    if state.complete:
        return _end_job_if_all_done(after._replace(consents=after.consents | (gone & state.participants.keys())))
    return after._replace(last_call=0) if len(after.participants) < settings.min_nodes else after


def _unchanged(_action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    return state


def _add_to_participants(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    assert action.node_info is not None
    entered = Participant(action.node_info, previous_rank=state.survivors.get(node))
    if state.is_initial:
        state = state._replace(removed=(), max_restarts=-1, programs={})
    participants = {**state.participants, node: entered}
    after = state._replace(
        participants=participants,
        wait_list=_without(state.wait_list, node),
        survivors=_without(state.survivors, node),
        removed=_without_replaced(state.removed, node) if entered.previous_rank is None else state.removed,
        max_restarts=action.node_info.max_restarts if state.max_restarts < 0 else state.max_restarts,
        programs=_with_program(state.programs, action.node_info),
    )
    if len(participants) == settings.min_nodes:
        after = after._replace(last_call=state.last_calls + 1, last_calls=state.last_calls + 1)
    full = len(participants) == settings.max_nodes
    return _complete(action, after, node, settings) if full and not state.restart_delay else after


def _with_program(programs: Mapping[str, str], node_info: NodeInfo) -> Mapping[str, str]:
    if not node_info.program or node_info.role in programs or len(programs) >= _MAX_ROLES:
        return programs
    return {**programs, node_info.role: node_info.program}


def _add_to_wait_list(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    assert action.node_info is not None
    return state._replace(
        wait_list={**state.wait_list, node: action.node_info},
        redundancy_list=_without(state.redundancy_list, node),
    )


def _add_to_redundancy_list(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    assert action.node_info is not None
    return state._replace(
        redundancy_list={**state.redundancy_list, node: action.node_info},
        wait_list=_without(state.wait_list, node),
        survivors=_without(state.survivors, node),
    )


def _remove_from_participants(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    after = state._replace(participants=_without(state.participants, node))
    if state.closed:
        return after
    if state.complete and node in state.succeeded and after.participants:
        return _end_job_if_all_done(after._replace(finished={**state.finished, node: state.participants[node]}))
    after = after._replace(removed=_with_removed(state, node, action.reason))
    if state.complete and state.is_preempted:
        return _end_job_if_all_done(after._replace(consents=after.consents | {node}))
    if not state.complete:
        return after._replace(last_call=0) if len(after.participants) < settings.min_nodes else after
    return _end_round(action, after, name_of(state, node), settings)


def _remove_from_wait_list(_action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    after = state._replace(wait_list=_without(state.wait_list, node))
    # The drain that the others were asked to agree to is no longer wanted.
    return after if after.wait_list or after.preempted else after._replace(consents=frozenset())


def _remove_from_redundancy_list(_action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return state._replace(redundancy_list=_without(state.redundancy_list, node))


def _remove_from_survivors(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return state._replace(survivors=_without(state.survivors, node), removed=_with_removed(state, node, action.reason))


def _with_removed(state: State, node: NodeId, reason: Reason) -> tuple[RemovedNode, ...]:
    """The removed nodes, and one more."""
    if len(state.removed) >= _MAX_REMOVED:
        return state.removed
    return (*state.removed, RemovedNode(node, name_of(state, node), reason))


def _without_replaced(gone: tuple[RemovedNode, ...], node: NodeId) -> tuple[RemovedNode, ...]:
    """The removed nodes that are not replaced after a node has joined: it takes its own place, or that of the first."""
    return tuple(each for each in gone if each.node != node) if node in {each.node for each in gone} else gone[1:]


def _abandon(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    from rallypoint.membership.names import abandoned_rendezvous

    abandoned = abandoned_rendezvous(state, node, action.seconds, settings)
    return state._replace(
        participants={},
        wait_list={},
        redundancy_list={},
        survivors={},
        heartbeats={},
        last_call=0,
        restart_delay=0.0,
        abandoned=abandoned,
    )


def _mark_closed(action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    return state._replace(
        closed=True, verdict=state.verdict or Verdict(Outcome.STOPPED, detail=action.detail, ending=Ending.STOPPED)
    )


def _mark_succeeded(_action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return _end_job_if_all_done(state._replace(succeeded=state.succeeded | {node}))


def _mark_consent(_action: Action, state: State, node: NodeId, settings: Settings) -> State:
    after = state._replace(consents=state.consents | {node})
    if after.is_preempted:
        return _end_job_if_all_done(after)
    if len(after.consents) < len(after.participants) or not after.consents.issuperset(after.participants):
        return after
    return _end_round(Action(ActionKind.END_ROUND, reason=Reason.DRAINED), after, name_of(after, node), settings)


def _mark_preempted(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return state._replace(preempted=Preemption(node, action.seconds))


def _mark_job_preempted(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    from rallypoint.membership.job_preemption import mark_job_preempted

    return mark_job_preempted(action, state, node)


def _mark_progress(action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    return state if action.progress is None else state._replace(progress=action.progress)


def _resize(action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    from rallypoint.membership.resize import resize

    assert action.size is not None
    return resize(state, action.size)


def _mark_quiet(_action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return state._replace(quiet=state.quiet ^ {node})


def _mark_job_failed(action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    ledger = state.ledger._replace(failures=state.ledger.failures + 1)
    restarts = Restarts(state.ledger.failures, action.max_restarts)
    verdict = Verdict(Outcome.FAILED, action.cause, action.detail, restarts, action.ending)
    return state._replace(closed=True, ledger=ledger, verdict=verdict)


def _mark_round_ended(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    return _end_round(action, state, name_of(state, node), settings)


def _complete(_action: Action, state: State, _node: NodeId, settings: Settings) -> State:
    nodes, entries = sorted(state.participants), state.participants.items()
    previous = {node: each.previous_rank for node, each in entries if each.previous_rank is not None}
    hints = {node: hint for node, each in entries if (hint := each.node_info.rank_hint) is not None}
    ranks = assign_group_ranks(nodes, None if settings.fixed_ranks else previous, hints)
    return state._replace(
        complete=True,
        restarts=state.ledger.failures,
        origin="",
        last_call=0,
        restart_delay=0.0,
        survivors={},
        removed=(),
        participants={node: state.participants[node]._replace(rank=ranks[node]) for node in nodes},
    )


def _end_round(action: Action, state: State, name: str, settings: Settings) -> State:
    """End a complete round by an action of the node with this name; `state` no longer has the nodes that leave."""
    detail = action.detail
    if action.reason is Reason.DRAINED:
        from rallypoint.membership.names import drain_detail

        detail = drain_detail(state, name)
    stays = len(known_to(state)) - (state.preempted is not None and state.preempted.node in state.participants)
    short = max(0, settings.min_nodes - stays)
    end = RoundEnd(state.round, action.reason, name, action.cause, detail, short)
    if action.reason is not Reason.FAILURE:
        return end_round(state, end)
    restarts = Restarts(state.ledger.failures + 1, action.max_restarts)
    delay = _restart_delay(action.failure_streak, settings)
    after = end_round(state, end._replace(restarts=restarts, held_back=delay))
    return after._replace(failure_streak=action.failure_streak, restart_delay=delay)


def _restart_delay(streak: FailureStreak, settings: Settings) -> float:
    """Seconds for which the round after the streak is held back: none after progress, then twice as long each time."""
    if not settings.restart_backoff or not streak.failures:
        return 0.0
    doublings = min(streak.failures - 1, 64)
    return float(min(settings.restart_backoff * 2**doublings, settings.restart_backoff_max))


def end_round(state: State, end: RoundEnd) -> State:
    """The state after the end of its round: the nodes of the round keep their places until they come back."""
    if state.is_preempted:  # reported to a new coordinator about a job that it does not know
        from rallypoint.membership.job_preemption import end_preempted_job

        return end_preempted_job(state)
    return state._replace(
        round=max(state.round + 1, state.next_round),
        complete=False,
        participants={},
        survivors={each: participant.rank for each, participant in state.participants.items()},
        succeeded=frozenset(),
        finished={},
        consents=frozenset(),
        quiet=frozenset(),
        preempted=None,
        restart_delay=0.0,
        ledger=_ledger_with(state.ledger, end.reason),
        ended=end,
    )


def _end_job_if_all_done(state: State) -> State:
    """End the job if all nodes are done: they have succeeded, or consented to the end of a preempted job."""
    # A node that has succeeded and left is still among the succeeded: it is not replaced.
    done = state.succeeded | state.consents if state.is_preempted else state.succeeded
    if len(done) < len(state.participants) or not done.issuperset(state.participants):
        return state
    if state.is_preempted and state.consents:
        from rallypoint.membership.job_preemption import end_preempted_job

        return end_preempted_job(state)
    return state._replace(closed=True, verdict=Verdict(Outcome.SUCCEEDED))


def _ledger_with(ledger: Ledger, reason: Reason) -> Ledger:
    field = _LEDGER_FIELDS.get(reason)
    return ledger if field is None else ledger._replace(**{field: getattr(ledger, field) + 1})


def _without(mapping: Mapping[NodeId, V], node: NodeId) -> Mapping[NodeId, V]:
    if node not in mapping:
        return mapping
    rest = dict(mapping)  # copy and delete: a comprehension would make a thousand nodes' joins quadratic in Python
    del rest[node]
    return rest


def _without_all(mapping: Mapping[NodeId, V], nodes: frozenset[NodeId]) -> Mapping[NodeId, V]:
    if nodes.isdisjoint(mapping):
        return mapping
    return {node: value for node, value in mapping.items() if node not in nodes}


_EFFECTS: dict[ActionKind, Callable[[Action, State, NodeId, Settings], State]] = {
    ActionKind.KEEP_ALIVE: _unchanged,
    ActionKind.ADD_TO_PARTICIPANTS: _add_to_participants,
    ActionKind.ADD_TO_WAIT_LIST: _add_to_wait_list,
    ActionKind.ADD_TO_REDUNDANCY_LIST: _add_to_redundancy_list,
    ActionKind.REMOVE_FROM_PARTICIPANTS: _remove_from_participants,
    ActionKind.REMOVE_FROM_WAIT_LIST: _remove_from_wait_list,
    ActionKind.REMOVE_FROM_REDUNDANCY_LIST: _remove_from_redundancy_list,
    ActionKind.REMOVE_FROM_SURVIVORS: _remove_from_survivors,
    ActionKind.MARK_RENDEZVOUS_COMPLETE: _complete,
    ActionKind.MARK_RENDEZVOUS_CLOSED: _mark_closed,
    ActionKind.MARK_SUCCEEDED: _mark_succeeded,
    ActionKind.MARK_CONSENT: _mark_consent,
    ActionKind.MARK_PREEMPTED: _mark_preempted,
    ActionKind.MARK_JOB_PREEMPTED: _mark_job_preempted,
    ActionKind.MARK_PROGRESS: _mark_progress,
    ActionKind.MARK_QUIET: _mark_quiet,
    ActionKind.MARK_JOB_FAILED: _mark_job_failed,
    ActionKind.END_ROUND: _mark_round_ended,
    ActionKind.RESIZE: _resize,
    ActionKind.ABANDON: _abandon,
}
"""Every other action leaves the state unchanged."""
