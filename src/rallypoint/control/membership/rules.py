"""The rules of every rendezvous: a function without side effects decides and applies the next step.

    step(operation, state, node, view, settings) -> State | NoChange | Refusal

The coordinator or a shared-state link runs an operation step by step until the result is not a state. Tables and names
follow the contract's section 4.6; where a row differs, a comment says why.

Laws:

1. Round numbers only grow, and only when a complete round ends.
2. The membership of a complete round never grows. Losing any node ends the round, unless that node has succeeded.
3. Survivors of the last round keep their places and group ranks until they return or are gone; new nodes and spares get
   only the rest.
4. A round is complete at once when it has max nodes, or when it has min nodes and every node known to be alive has
   joined. It waits for the end of the last call only because of unknown nodes (no survivor of an earlier round has
   joined). It is not complete while an observer awaits participants that have not reported: if one of them were gone,
   the workers would start in vain.
5. Departures, losses and drains use up no restart and never close the job. Only a verdict closes it.
6. If a node's join deadline passes and too few joined or expected nodes remain without it, the rendezvous fails for all
   waiting nodes: the first deadline decides. If enough remain, only that node leaves. No deadline passes while the
   round waits only for a point in time.
7. In a preempted job, the round ends only with the job: when all its nodes have consented, failed or succeeded.
8. A round has at most one counted failure: when a node reports a second one, the round has already ended.
9. No time here comes from another host's clock: a `ClockView` belongs to one observer.
10. With segments, only nodes in whole segments count in laws 4 and 6. More than max nodes can join a forming round, and
   `segments` decides which of them are in it. Law 3 then applies as far as whole segments permit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from rallypoint.base.light_typing import Any, NamedTuple, TypeVar
from rallypoint.control.membership.mappings import (
    any_with,
    with_entry,
    with_member,
    without,
    without_member,
)
from rallypoint.control.membership.state import (
    Close,
    Drain,
    Exit,
    Fail,
    FailureStreak,
    JobProgress,
    Join,
    KeepLeaseAlive,
    NoChange,
    NodeId,
    NodeInfo,
    NodeRange,
    NodeRanks,
    Operation,
    Outcome,
    Participant,
    Preempt,
    PreemptionNotice,
    PreemptJob,
    Reason,
    RecordProgress,
    Refusal,
    Rejoin,
    RemovedNode,
    ReportQuiet,
    Resize,
    Restart,
    RoundEnd,
    Settings,
    State,
    Succeed,
    Verdict,
    hint_of,
    name_of,
    number_known_to,
)
from rallypoint.failures.cause import Cause, Ending, Restarts

Step = State | NoChange | Refusal

MAX_REMOVED = 4
"""Maximum number of removed nodes to store."""
_MAX_ROLES = 16
"""Maximum number of roles whose programs to store."""
_LEDGER_FIELDS = {
    Reason.FAILURE: "failures",
    Reason.LOST: "lost",
    Reason.DEPARTED: "departed",
    Reason.DRAINED: "drained",
    Reason.REQUESTED: "requested",
}
"""Counters of the reasons why rounds end; other reasons are not counted."""


class ClockView(NamedTuple):
    """An observer's view of time, in seconds on its own clock.

    `last_call_at`: when it first saw the running last call. `heartbeat_at`: when it last sent a heartbeat.
    `forming_at`, `running_at`: when it first saw this round, and saw it complete. `removed_at`: when it first saw each
    of `State.removed`. `failures_at`: when it saw each of the last failures; only with `Settings.restart_window`.
    `awaits_until`: until when it awaits participants of a forming round that have not reported.
    """

    now: float
    last_call_at: float | None = None
    heartbeat_at: float | None = None
    forming_at: float | None = None
    running_at: float | None = None
    removed_at: tuple[float, ...] = ()
    awaits_until: float = -math.inf
    failures_at: tuple[float, ...] = ()


def step(operation: Operation, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
    """The state after the next step of `node`'s operation, or why no step is possible now or at all."""
    after = _RULES[type(operation)](operation, state, node, view, settings)
    if not isinstance(after, State):
        return after
    if settings.counts_heartbeats and after.knows(node):
        return after._replace(heartbeats=with_entry(after.heartbeats, node, after.heartbeats.get(node, 0) + 1))
    return after._replace(heartbeats=without(after.heartbeats, node)) if node in after.heartbeats else after


# Joining


def ready(state: State, view: ClockView, settings: Settings) -> bool:
    """Whether the forming round can be complete now (law 4)."""
    return is_settled(state, settings) and view.now >= starts_at(state, view, settings)


def is_settled(state: State, settings: Settings) -> bool:
    """Whether the forming round is waiting only for the time `starts_at`."""
    if state.complete or not _are_enough(state, settings):
        return False
    return (
        _is_full(state, settings)
        or last_call_decides(state)
        or not (_awaited_nodes(state, settings) or state.wait_list)
    )


def number_fitting(state: State, settings: Settings) -> int:
    """How many nodes the forming round would have now: all joined ones, or those in whole segments."""
    if settings.segment < 2:
        return len(state.participants)
    from rallypoint.control.membership.segments import nodes_in_segments

    return nodes_in_segments(state.participants, settings)


def _is_full(state: State, settings: Settings) -> bool:
    """Whether the forming round needs no more nodes. Only then do segments decide which nodes are in it."""
    if len(state.participants) < settings.max_nodes or number_fitting(state, settings) != settings.max_nodes:
        return False
    return not (settings.segment > 1 and _awaited_nodes(state, settings))


def _are_enough(state: State, settings: Settings) -> bool:
    least = settings.min_nodes
    return len(state.participants) >= least and number_fitting(state, settings) >= least


def _awaited_nodes(state: State, settings: Settings) -> Mapping[NodeId, object]:
    """Nodes that the forming round waits for: survivors and, with segments, spares, all of which ask again."""
    return state.survivors or (state.redundancy_list if settings.segment > 1 else {})


def starts_at(state: State, view: ClockView, settings: Settings) -> float:
    """When a settled round (`is_settled`) will be complete, on the view's clock."""
    moment = max(view.awaits_until, backoff_ends(state, view) if state.restart_delay else -math.inf)
    if _is_full(state, settings) or not last_call_decides(state):
        return moment
    return math.inf if view.last_call_at is None else max(moment, view.last_call_at + settings.last_call_timeout)


def backoff_ends(state: State, view: ClockView) -> float:
    """Until when the forming round is delayed, on the view's clock."""
    return (view.now if view.forming_at is None else view.forming_at) + state.restart_delay


def last_call_decides(state: State) -> bool:
    """Whether the forming round, once it has min nodes, waits for the end of the last call.

    It does not if a survivor of the previous round has joined, because then the expected nodes are known.
    """
    return state.round == 0 or not any_with(state.participants, _was_there, True)


def _was_there(_node: NodeId, participant: Participant) -> bool:
    return participant.previous_rank is not None


def has_place(state: State, node: NodeId, domain: str, settings: Settings) -> bool:
    """Whether the node has a place in this or the next round, or can get one (law 3)."""
    if node in state.participants or node in state.wait_list or node in state.survivors:
        return True
    if settings.segment > 1:
        from rallypoint.control.membership.segments import completes_segment

        return not state.complete or completes_segment(state, node, domain, settings)
    return len(state.participants) + len(state.wait_list) + len(state.survivors) < settings.max_nodes


def needs_all(state: State, settings: Settings) -> bool:
    """Whether the forming round needs every joined or expected node."""
    if state.complete or number_known_to(state) <= settings.min_nodes:
        return not state.complete
    if settings.segment < 2 or _awaited_nodes(state, settings):
        return False
    return number_fitting(state, settings) < settings.min_nodes


def _join(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
    spare = node in state.redundancy_list
    if state.closed:
        return Refusal.SPARE_NOT_NEEDED if spare else Refusal.CLOSED
    if spare:
        if has_place(state, node, state.redundancy_list[node].domain, settings):
            return state._replace(redundancy_list=without(state.redundancy_list, node))
        return _heartbeat_or_wait(state, view, settings)
    if state.complete and node in state.participants:
        return NoChange.DONE
    if operation.since != state.abandoned.number:
        return Refusal.TIMEOUT
    if view.now >= operation.deadline and not (node in state.participants and is_settled(state, settings)):
        return _give_up(operation, state, node, view, settings)
    if settings.fixed_ranks and not state.knows(node) and _rank_is_taken(operation, state):
        return Refusal.RANK_TAKEN
    if state.complete:
        return _wait_for_next(operation, state, node, view, settings)
    return _join_forming_round(operation, state, node, view, settings)


def renewed(join: Join, before: State, after: State, node: NodeId, now: float, settings: Settings) -> Join:
    """The join after a step: if a spare can get a place, its join timeout starts again (contract 4.6)."""
    if node in before.redundancy_list and node not in after.redundancy_list:
        return join._replace(deadline=now + settings.join_timeout)
    return join


def _give_up(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
    """torch keeps a node that is more than five seconds late in its lists; here a node that gives up is removed."""
    if state.knows(node) and needs_all(state, settings):
        return _abandon(state, node, view.now - operation.asked_at, settings)
    return _removed(state, node, Reason.GAVE_UP, "", settings) or Refusal.TIMEOUT


def _wait_for_next(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
    if node in state.wait_list:
        return _heartbeat_or_wait(state, view, settings)
    # While one place is free, torch puts any number of nodes on the wait list and drops those that get no place.
    if not has_place(state, node, operation.node_info.domain, settings):
        return _add_spare(state, node, operation.node_info)
    return state._replace(
        wait_list=with_entry(state.wait_list, node, operation.node_info),
        redundancy_list=without(state.redundancy_list, node),
    )


def _join_forming_round(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
    if node in state.participants:
        return _complete(state, settings) if ready(state, view, settings) else _heartbeat_or_wait(state, view, settings)
    # While survivors keep their places, another new node is a spare even though the round is still forming. After an
    # operator reduced the job, there may be more survivors than places.
    more = settings.segment > 1 or len(state.participants) < settings.max_nodes
    if more and has_place(state, node, operation.node_info.domain, settings):
        after = _add_participant(state, node, operation.node_info, settings)
        return _complete(after, settings) if _is_full(after, settings) and ready(after, view, settings) else after
    return _add_spare(state, node, operation.node_info)


def _rank_is_taken(operation: Join, state: State) -> bool:
    """Whether a live node, or one that is about to return, has the (fixed) rank."""
    hint = operation.node_info.rank_hint
    return any_with(state.participants, hint_of, hint) or any_with(state.survivors, _rank_of, hint)


def _rank_of(_node: NodeId, rank: int) -> int:
    return rank


def _heartbeat_or_wait(state: State, view: ClockView, settings: Settings) -> Step:
    return state if _heartbeat_due(view, settings) else NoChange.WAIT


def _heartbeat_due(view: ClockView, settings: Settings) -> bool:
    return view.heartbeat_at is not None and view.now >= view.heartbeat_at + settings.keep_alive_interval


def _add_participant(state: State, node: NodeId, node_info: NodeInfo, settings: Settings) -> State:
    entered = Participant(node_info, previous_rank=state.survivors.get(node))
    is_replacement = entered.previous_rank is None and settings.segment < 2  # with segments this is unknown so far
    if state.is_initial:
        state = state._replace(removed=(), max_restarts=-1, programs={})
    participants = with_entry(state.participants, node, entered)
    after = state._replace(
        participants=participants,
        wait_list=without(state.wait_list, node),
        survivors=without(state.survivors, node),
        removed=_without_replaced(state.removed, node) if state.removed and is_replacement else state.removed,
        max_restarts=node_info.max_restarts if state.max_restarts < 0 else state.max_restarts,
        programs=_with_program(state.programs, node_info),
    )
    return _with_last_call(state, after, settings)


def _with_last_call(before: State, after: State, settings: Settings) -> State:
    """Begin a last call in the state if there are enough nodes only now."""
    if _are_enough(after, settings) and not _are_enough(before, settings):
        return after._replace(last_call=before.last_calls + 1, last_calls=before.last_calls + 1)
    return after


def _rejoin(operation: Rejoin, state: State, _node: NodeId, view: ClockView, settings: Settings) -> Step:
    """Add all survivors in linear time, with the result of one `_add_participant` after the other."""
    if not state.survivors:
        return _complete(state, settings) if ready(state, view, settings) else NoChange.WAIT
    back = {node: Participant(info, previous_rank=state.survivors[node]) for node, info in operation.node_infos.items()}
    return _with_last_call(state, state._replace(participants={**state.participants, **back}, survivors={}), settings)


def _without_replaced(gone: tuple[RemovedNode, ...], node: NodeId) -> tuple[RemovedNode, ...]:
    """The removed nodes still not replaced after a node joined: it takes its own place, or the first node's."""
    return (
        tuple(removed for removed in gone if removed.node != node)
        if node in {removed.node for removed in gone}
        else gone[1:]
    )


def _with_program(programs: Mapping[str, str], node_info: NodeInfo) -> Mapping[str, str]:
    if not node_info.program or node_info.role in programs or len(programs) >= _MAX_ROLES:
        return programs
    return {**programs, node_info.role: node_info.program}


def _add_spare(state: State, node: NodeId, node_info: NodeInfo) -> State:
    return state._replace(
        redundancy_list=with_entry(state.redundancy_list, node, node_info),
        wait_list=without(state.wait_list, node),
        survivors=without(state.survivors, node),
    )


def _complete(state: State, settings: Settings) -> State:
    nodes, entries = sorted(state.participants), state.participants.items()
    if settings.segment > 1:
        from rallypoint.control.membership.segments import ranks_and_spares

        ranks, spares = ranks_and_spares(state, nodes, settings)
        nodes, state = [node for node in nodes if node in ranks], state._replace(redundancy_list=spares)
    else:
        previous = {
            node: participant.previous_rank for node, participant in entries if participant.previous_rank is not None
        }
        hints = {node: hint for node, participant in entries if (hint := participant.node_info.rank_hint) is not None}
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


def _abandon(state: State, node: NodeId, seconds: float, settings: Settings) -> State:
    from rallypoint.control.membership.endings import abandoned_rendezvous

    return state._replace(
        participants={},
        wait_list={},
        redundancy_list={},
        survivors={},
        heartbeats={},
        last_call=0,
        restart_delay=0.0,
        abandoned=abandoned_rendezvous(state, node, seconds, number_fitting(state, settings), settings),
    )


# Leaving


def _exit(operation: Exit, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
    after = _removed(state, node, operation.reason, operation.detail, settings)
    if after is None:
        if operation.ended_with_0 and state.removed:
            from rallypoint.control.membership.endings import with_ended_workers

            after = with_ended_workers(state, node)
        return NoChange.DONE if after in (None, state) else after
    return Refusal.TIMEOUT if view.now >= operation.deadline else after


def _removed(state: State, node: NodeId, reason: Reason, detail: str, settings: Settings) -> State | None:
    """The state without a node; None if the node is in no list."""
    if node in state.participants:
        return _without_participant(state, node, reason, detail, settings)
    if node in state.wait_list:
        after = state._replace(wait_list=without(state.wait_list, node))
        return without_needless_waits(state, after, (), settings)
    if node in state.redundancy_list:
        after = state._replace(redundancy_list=without(state.redundancy_list, node))
        return without_needless_waits(state, after, (node,), settings)
    if node in state.survivors:
        return state._replace(survivors=without(state.survivors, node), removed=_with_removed(state, node, reason))
    return None


def without_needless_waits(before: State, after: State, gone: Sequence[NodeId], settings: Settings) -> State:
    """The state after waiting nodes are gone."""
    if settings.segment > 1:
        from rallypoint.control.membership.segments import without_partial_segments

        after = without_partial_segments(before, after, gone, settings.segment)
    if before.wait_list and not after.wait_list and not after.preempted:
        # Nobody wants the drain to which the others were to consent any more.
        return after._replace(consents=frozenset())
    return after


def _without_participant(state: State, node: NodeId, reason: Reason, detail: str, settings: Settings) -> State:
    after = state._replace(participants=without(state.participants, node))
    if state.closed:
        return after
    if state.complete and node in state.succeeded and after.participants:
        return end_job_if_all_done(after._replace(finished=with_entry(state.finished, node, state.participants[node])))
    after = after._replace(removed=_with_removed(state, node, reason))
    if state.complete and state.is_preempted:
        return end_job_if_all_done(after._replace(consents=with_member(after.consents, node)))
    if not state.complete:
        return after._replace(last_call=0) if number_fitting(after, settings) < settings.min_nodes else after
    return end_round(after, _round_end(after, reason, name_of(state, node), settings, detail=detail))


def _with_removed(state: State, node: NodeId, reason: Reason) -> tuple[RemovedNode, ...]:
    """Removed nodes, including this one."""
    if len(state.removed) >= MAX_REMOVED:
        return state.removed
    return (*state.removed, RemovedNode(node, name_of(state, node), reason))


# Ends of rounds and of the job


def _fail(operation: Fail, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
    if not state.runs(node, operation.round):
        return NoChange.DONE
    if state.is_preempted:  # anything unsaved is lost anyway
        return _consent(state, node, settings)
    from rallypoint.control.membership.endings import failure_streak_after
    from rallypoint.failures.kinds import cannot_change

    ran = None if view.running_at is None else view.now - view.running_at
    streak = failure_streak_after(state, operation.cause, ran, settings)
    cause, most = operation.cause, operation.max_restarts
    if settings.restart_window and most:  # a node that cannot be restarted sends 0
        from rallypoint.control.membership.endings import restarts_allowed

        most = restarts_allowed(state, view.now, view.failures_at, settings)
    if state.ledger.failures >= most:
        return _fail_job(state, Verdict(Outcome.FAILED, cause, ending=cause.ending), most)
    if streak.repeats and not settings.retry_all and cannot_change(cause):
        detail = "the same failure came back, and a restart cannot fix it (retry_all=true retries anyway)"
        return _fail_job(state, Verdict(Outcome.FAILED, cause, detail, ending=Ending.REPEATED), most)
    if 0 < settings.same_failure_limit <= streak.repeats:
        often = "once" if streak.repeats == 1 else f"{streak.repeats} times"
        detail = f"the same failure came back {often} without progress (same_failure_limit)"
        return _fail_job(state, Verdict(Outcome.FAILED, cause, detail, ending=Ending.REPEATED), most)
    delay = _restart_delay(streak, settings)
    restarts = Restarts(state.ledger.failures + 1, most)
    end = _round_end(state, Reason.FAILURE, name_of(state, node), settings, cause=cause)
    end = end._replace(restarts=restarts, held_back=delay, restarts_workers=operation.restarts_workers)
    after = end_round(state, end)
    if settings.restart_window:  # all nodes log this as the budget
        after = after._replace(max_restarts=most)
    return after._replace(failure_streak=streak, restart_delay=delay)


def _fail_job(state: State, verdict: Verdict, max_restarts: int) -> State:
    ledger = state.ledger._replace(failures=state.ledger.failures + 1)
    restarts = Restarts(state.ledger.failures, max_restarts)
    return state._replace(closed=True, ledger=ledger, verdict=verdict._replace(restarts=restarts))


def _restart_delay(streak: FailureStreak, settings: Settings) -> float:
    """Seconds to delay the round after the streak: none after progress, then twice as long each time."""
    if not settings.restart_backoff or not streak.failures:
        return 0.0
    doublings = min(streak.failures - 1, 64)
    return float(min(settings.restart_backoff * 2**doublings, settings.restart_backoff_max))


def _succeed(operation: Succeed, state: State, node: NodeId, _view: ClockView, _settings: Settings) -> Step:
    if not state.runs(node, operation.round) or node in state.succeeded:
        return NoChange.DONE
    return end_job_if_all_done(state._replace(succeeded=with_member(state.succeeded, node)))


def _drain(operation: Drain, state: State, node: NodeId, _view: ClockView, settings: Settings) -> Step:
    if not state.runs(node, operation.round):
        return NoChange.DONE
    if state.is_preempted:
        return _consent(state, node, settings) if operation.needs_consent else NoChange.DONE
    # Once a node has succeeded, repeating its work for new nodes is not worth it.
    if state.succeeded:
        return NoChange.DONE
    if not operation.needs_consent:
        return end_round(state, _round_end(state, Reason.DRAINED, name_of(state, node), settings))
    # Without a waiting node, nobody wants the drain any more.
    return _consent(state, node, settings) if state.wait_list or state.preempted else NoChange.DONE


def _consent(state: State, node: NodeId, settings: Settings) -> Step:
    return NoChange.DONE if node in state.consents else with_consent(state, node, settings)


def with_consent(state: State, node: NodeId, settings: Settings) -> State:
    """The state after `node` agreed to end the running round."""
    after = state._replace(consents=with_member(state.consents, node))
    if after.is_preempted:
        return end_job_if_all_done(after)
    if not _are_all(after, after.consents):
        return after
    return end_round(after, _round_end(after, Reason.DRAINED, name_of(after, node), settings))


def _preempt(operation: Preempt, state: State, node: NodeId, _view: ClockView, _settings: Settings) -> Step:
    if state.closed or state.is_preempted or not state.runs(node, operation.round) or state.succeeded:
        return NoChange.DONE
    notice = PreemptionNotice(node, operation.seconds, why=operation.why)
    return NoChange.DONE if state.preempted == notice else state._replace(preempted=notice)


def _preempt_job(operation: PreemptJob, state: State, node: NodeId, _view: ClockView, _settings: Settings) -> Step:
    if state.closed or state.is_preempted:
        return NoChange.DONE
    who = operation.who or name_of(state, node)
    notice = PreemptionNotice(node, operation.seconds, whole_job=True, who=who, why=operation.why)
    after = state._replace(preempted=notice, consents=frozenset())
    return after if after.complete else _end_preempted_job(after)  # without a running round, there is nothing to save


def _restart(operation: Restart, state: State, node: NodeId, _view: ClockView, settings: Settings) -> Step:
    if not state.complete or state.closed or state.round != operation.round or state.is_preempted:
        return NoChange.DONE
    return end_round(state, _round_end(state, Reason.REQUESTED, name_of(state, node), settings))


def _close(operation: Close, state: State, _node: NodeId, view: ClockView, _settings: Settings) -> Step:
    if state.closed:
        return NoChange.DONE
    if view.now >= operation.deadline:
        return Refusal.TIMEOUT
    stopped = Verdict(Outcome.STOPPED, detail=operation.detail, ending=Ending.STOPPED)
    return state._replace(closed=True, verdict=state.verdict or stopped)


def _round_end(
    state: State, reason: Reason, name: str, settings: Settings, *, cause: Cause | None = None, detail: str = ""
) -> RoundEnd:
    """End a complete round because of the node `name`; `state` no longer contains the leaving nodes."""
    if reason is Reason.DRAINED:
        from rallypoint.control.membership.endings import drain_detail

        detail = drain_detail(state, name)
    stays = number_known_to(state) - (state.preempted is not None and state.preempted.node in state.participants)
    return RoundEnd(
        round=state.round,
        reason=reason,
        node=name,
        cause=cause,
        detail=detail,
        missing_nodes=max(0, settings.min_nodes - stays),
    )


def end_round(state: State, end: RoundEnd) -> State:
    """The state after its round ended; the nodes keep their places until they return."""
    if state.is_preempted:  # reported to a new coordinator that does not know the job
        return _end_preempted_job(state)
    ledger, field = state.ledger, _LEDGER_FIELDS.get(end.reason)
    return state._replace(
        round=max(state.round + 1, state.next_round),
        complete=False,
        participants={},
        survivors={node: participant.rank for node, participant in state.participants.items()},
        succeeded=frozenset(),
        finished={},
        consents=frozenset(),
        quiet=frozenset(),
        preempted=None,
        restart_delay=0.0,
        ledger=ledger if field is None else ledger._replace(**{field: getattr(ledger, field) + 1}),
        ended=end,
    )


def end_job_if_all_done(state: State) -> State:
    """End the job if all nodes succeeded, or consented to the end of a preempted job."""
    # A node that succeeded and left still counts as succeeded, and is not replaced.
    if not _are_all(state, state.succeeded, state.consents if state.is_preempted else frozenset()):
        return state
    if state.is_preempted and state.consents:
        return _end_preempted_job(state)
    return state._replace(closed=True, verdict=Verdict(Outcome.SUCCEEDED))


def _are_all(state: State, some: AbstractSet[NodeId], others: AbstractSet[NodeId] = frozenset()) -> bool:
    """Whether all participants are in these sets. Returns at once if the sets are too small."""
    if len(some) + len(others) < len(state.participants):
        return False
    return all(node in some or node in others for node in state.participants)


def _end_preempted_job(state: State) -> State:
    """End a job whose remaining nodes have all saved. One of them becomes the delegate.

    The job succeeded if all its nodes did. A node that consented has not finished; a node that was lost or failed never
    will.
    """
    notice = state.preempted
    assert notice is not None, "a job that was preempted knows by whom"
    in_order = sorted(state.participants.items(), key=lambda entry: entry[1].rank) if state.complete else ()
    delegate = next((node for node, _ in in_order if not node.is_placeholder), notice.node)
    detail = f"{notice.who} {notice.why}"
    return state._replace(
        closed=True, verdict=Verdict(Outcome.STOPPED, detail=detail, ending=Ending.PREEMPTED, delegate=delegate)
    )


# Heartbeats, progress and size


def _record_progress(
    operation: RecordProgress, state: State, node: NodeId, _view: ClockView, _settings: Settings
) -> Step:
    known = state.progress
    new = operation.made and (operation.step < 0 or operation.step > known.step)
    in_round = new and state.runs(node, operation.round)
    reached = JobProgress(max(known.step, operation.step), state.round if in_round else known.round, reported=True)
    return NoChange.DONE if state.closed or reached == known else state._replace(progress=reached)


def _report_quiet(operation: ReportQuiet, state: State, node: NodeId, _view: ClockView, _settings: Settings) -> Step:
    changes = state.runs(node, operation.round) and (node in state.quiet) != operation.quiet
    change = with_member if operation.quiet else without_member
    return state._replace(quiet=change(state.quiet, node)) if changes else NoChange.DONE


def _keep_alive(operation: KeepLeaseAlive, state: State, _node: NodeId, view: ClockView, settings: Settings) -> Step:
    if not _heartbeat_due(view, settings):
        return NoChange.DONE
    return Refusal.TIMEOUT if view.now >= operation.deadline else state


def _resize(operation: Resize, state: State, _node: NodeId, _view: ClockView, settings: Settings) -> Step:
    return NoChange.DONE if state.size == operation.size else with_size(state, operation.size, settings)


def with_size(state: State, size: NodeRange, settings: Settings) -> State:
    """The state after an operator resized the job."""
    from rallypoint.control.membership.endings import resized

    number = number_fitting(state, settings._replace(**size._asdict()))
    return resized(state, size, number, has_segments=settings.segment > 1)


_RULES: dict[type, Callable[[Any, State, NodeId, ClockView, Settings], Step]] = {
    Join: _join,
    Rejoin: _rejoin,
    Exit: _exit,
    Fail: _fail,
    Succeed: _succeed,
    Drain: _drain,
    Preempt: _preempt,
    PreemptJob: _preempt_job,
    RecordProgress: _record_progress,
    ReportQuiet: _report_quiet,
    Close: _close,
    Restart: _restart,
    Resize: _resize,
    KeepLeaseAlive: _keep_alive,
}


# Group ranks of nodes, and ranks of their workers. Laws:
#
# 1. The group ranks are 0..n-1, each used once.
# 2. A survivor keeps its group rank if the new round has it; new nodes get the free ones.
# 3. A hint is honoured if the rank is free; if two hints are equal, the first in order wins.
# 4. Workers are numbered node by node in group-rank order; roles never reorder them (contract section 3.2).


N = TypeVar("N")


def assign_group_ranks(
    nodes: Sequence[N], previous: Mapping[N, int] | None = None, hints: Mapping[N, int] | None = None
) -> dict[N, int]:
    """Assign each of `nodes` a group rank.

    Args:
        nodes: all participants; those without a claim get free ranks in this order.
        previous: the ranks of survivors in the previous round.
        hints: ranks that nodes requested.
    """
    taken: dict[int, N] = {}
    for claims in (previous or {}, hints or {}):
        placed = set(taken.values())
        for node in nodes:
            rank = claims.get(node)
            if rank is not None and 0 <= rank < len(nodes) and node not in placed:
                taken.setdefault(rank, node)
    placed = set(taken.values())
    holes = (rank for rank in range(len(nodes)) if rank not in taken)
    unplaced = [node for node in nodes if node not in placed]
    return {node: rank for rank, node in taken.items()} | dict(zip(unplaced, holes, strict=False))


def assign_worker_ranks(members: Sequence[tuple[str, int]]) -> list[NodeRanks]:
    """Assign ranks to each node's workers; `members` are (role, local world size) in group-rank order."""
    world_size = sum(size for _, size in members)
    role_sizes: dict[str, int] = {}
    bases: list[tuple[int, int]] = []
    base = 0
    for role, size in members:
        bases.append((base, role_sizes.get(role, 0)))
        base += size
        role_sizes[role] = role_sizes.get(role, 0) + size
    return [
        NodeRanks(base_rank, world_size, base_role_rank, role_sizes[role])
        for (base_rank, base_role_rank), (role, _) in zip(bases, members, strict=True)
    ]
