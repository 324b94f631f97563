"""The two functions that decide every rendezvous. They have no side effects: data in, data out.

    next_action(operation, state, node, view, settings) -> Action
    apply(action, state, node, settings)                 -> State

The second is in `transitions`. The coordinator, or a shared-state link, runs an operation by asking for the next action
and applying it, until the action is a final one. Tables and names follow the contract's section 4.6; if a row differs,
a comment gives the reason.

Laws:

1. Round numbers only grow, and only when a complete round ends.
2. The membership of a complete round never grows. Any loss of a node ends it, unless that node has succeeded.
3. Surviving nodes of the last round keep their places and group ranks until they come back or are gone;
   a new node or a spare gets only what is left.
4. A round is complete at once when it has max nodes, or min nodes and every node known to be alive has joined. Only for
   unknown nodes (no survivor of an earlier round has joined) does it wait for the end of the last call.
5. Departures, losses and drains cost no restart and never close the job. Only a verdict does.
6. When the time of a node is over, and the others that have joined or are expected are too few without it, the
   rendezvous has failed for all waiting nodes: the first one whose time is over decides. If they are enough, only that
   node leaves. No node's time is over while the round waits only for a moment that will come.
7. Once the whole job is preempted its round ends only with it: when all its nodes have consented, failed or succeeded.
8. A round has at most one counted failure: a node that reports another for the same round finds it over.
9. No time here was measured on another host's clock: a `ClockView` is one observer's own.
"""

from __future__ import annotations

import math

from rallypoint.base.light_typing import NamedTuple
from rallypoint.failures.cause import Ending
from rallypoint.membership.operations import (
    FINISH,
    SYNC,
    Action,
    ActionKind,
    Close,
    Drain,
    Exit,
    Fail,
    Join,
    KeepLeaseAlive,
    Operation,
    Preempt,
    PreemptJob,
    RecordProgress,
    ReportQuiet,
    Resize,
    Restart,
    Succeed,
)
from rallypoint.membership.state import (
    JobProgress,
    NodeId,
    Preemption,
    Reason,
    Settings,
    State,
    known_to,
    name_of,
)


class ClockView(NamedTuple):
    """One observer's view of time, in seconds on its own clock.

    `last_call_at` is when it first saw the running last call, `heartbeat_at` when it last sent a heartbeat,
    `forming_at` when it first saw this round, `running_at` when it first saw it complete, `removed_at` when it first
    saw that each of `State.removed` was.
    """

    now: float
    last_call_at: float | None = None
    heartbeat_at: float | None = None
    forming_at: float | None = None
    running_at: float | None = None
    removed_at: tuple[float, ...] = ()


def next_action(operation: Operation, state: State, node: NodeId, view: ClockView, settings: Settings) -> Action:
    """The next step of `node`'s operation, given what it sees. Changes nothing."""
    match operation:
        case Join():
            return _join(operation, state, node, view, settings)
        case Exit():
            return _exit(operation, state, node, view)
        case Fail():
            return _fail(operation, state, node, view, settings)
        case Succeed():
            return _succeed(operation, state, node)
        case Drain():
            return _drain(operation, state, node)
        case Preempt() | PreemptJob():
            return _preempt(operation, state, node)
        case RecordProgress():
            return _record_progress(operation, state, node)
        case ReportQuiet():
            from rallypoint.membership.hang import report_quiet

            return report_quiet(operation, state, node)
        case Close():
            return _close(operation, state, view)
        case Restart() | Resize():
            return _command(operation, state)
        case KeepLeaseAlive():
            return _keep_alive(operation, view, settings)


def ready(state: State, view: ClockView, settings: Settings) -> bool:
    """Whether the forming round can be complete now (law 4)."""
    return settled(state, settings) and view.now >= starts_at(state, view, settings)


def settled(state: State, settings: Settings) -> bool:
    """Whether the forming round waits only for the moment of `starts_at`."""
    count = len(state.participants)
    if state.complete or not settings.min_nodes <= count:
        return False
    return count == settings.max_nodes or last_call_decides(state) or not (state.survivors or state.wait_list)


def starts_at(state: State, view: ClockView, settings: Settings) -> float:
    """When a round that is `settled` will be complete, on the clock of the view."""
    moment = backoff_ends(state, view) if state.restart_delay else -math.inf
    if len(state.participants) == settings.max_nodes or not last_call_decides(state):
        return moment
    return math.inf if view.last_call_at is None else max(moment, view.last_call_at + settings.last_call_timeout)


def backoff_ends(state: State, view: ClockView) -> float:
    """The time until which the forming round is held back, on the clock of the view."""
    return (view.now if view.forming_at is None else view.forming_at) + state.restart_delay


def last_call_decides(state: State) -> bool:
    """Whether the forming round waits for the end of the last call, once it has min nodes.

    Not if a survivor of the previous round has joined: then the expected nodes are known.
    """
    return state.round == 0 or all(each.previous_rank is None for each in state.participants.values())


def has_place(state: State, node: NodeId, settings: Settings) -> bool:
    """Whether the node holds a place of this or the next round, or one is left for it (law 3)."""
    if node in state.participants or node in state.wait_list or node in state.survivors:
        return True
    return len(state.participants) + len(state.wait_list) + len(state.survivors) < settings.max_nodes


def _join(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Action:
    spare = node in state.redundancy_list
    if state.closed:
        return Action(ActionKind.GRACEFUL_EXIT if spare else ActionKind.ERROR_CLOSED)
    if spare:
        if has_place(state, node, settings):
            return Action(ActionKind.REMOVE_FROM_REDUNDANCY_LIST)
        return _heartbeat_or_sync(view, settings)
    if state.complete and node in state.participants:
        return FINISH
    if operation.since != state.abandoned.number:
        return Action(ActionKind.ERROR_TIMEOUT)
    if view.now >= operation.deadline and not (node in state.participants and settled(state, settings)):
        return _give_up(operation, state, node, view, settings)
    if settings.fixed_ranks and not state.knows(node) and _rank_is_taken(operation, state):
        return Action(ActionKind.ERROR_RANK_TAKEN)
    if state.complete:
        return _wait_for_next(operation, state, node, view, settings)
    return _join_forming_round(operation, state, node, view, settings)


def needs_all(state: State, settings: Settings) -> bool:
    """Whether the forming round needs every node that has joined or is expected."""
    return not state.complete and len(known_to(state)) <= settings.min_nodes


def _give_up(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Action:
    """torch keeps a node in the lists that is late by more than five seconds; here a node that gives up is removed."""
    if state.knows(node) and needs_all(state, settings):
        return Action(ActionKind.ABANDON, seconds=view.now - operation.asked_at)
    return _removal(state, node, Reason.GAVE_UP) or Action(ActionKind.ERROR_TIMEOUT)


def _removal(state: State, node: NodeId, reason: Reason, detail: str = "") -> Action | None:
    """The action that removes a node from its list; None if it is in none."""
    if node in state.participants:
        return Action(ActionKind.REMOVE_FROM_PARTICIPANTS, reason=reason, detail=detail)
    if node in state.wait_list:
        return Action(ActionKind.REMOVE_FROM_WAIT_LIST)
    if node in state.redundancy_list:
        return Action(ActionKind.REMOVE_FROM_REDUNDANCY_LIST)
    return Action(ActionKind.REMOVE_FROM_SURVIVORS, reason=reason) if node in state.survivors else None


def _wait_for_next(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Action:
    if node in state.wait_list:
        return _heartbeat_or_sync(view, settings)
    # torch lets any number of nodes onto the wait list while one place is free, and drops those that get none.
    kind = ActionKind.ADD_TO_WAIT_LIST if has_place(state, node, settings) else ActionKind.ADD_TO_REDUNDANCY_LIST
    return Action(kind, node_info=operation.node_info)


def _join_forming_round(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Action:
    if node in state.participants:
        return (
            Action(ActionKind.MARK_RENDEZVOUS_COMPLETE)
            if ready(state, view, settings)
            else _heartbeat_or_sync(view, settings)
        )
    # While the places of survivors are kept for them, one more new node is a spare even though the round still forms.
    # There may be more survivors than places, after an operator has reduced the job.
    full = len(state.participants) >= settings.max_nodes
    has_room = not full and has_place(state, node, settings)
    act = ActionKind.ADD_TO_PARTICIPANTS if has_room else ActionKind.ADD_TO_REDUNDANCY_LIST
    return Action(act, node_info=operation.node_info)


def _rank_is_taken(operation: Join, state: State) -> bool:
    """Whether a live node holds the rank, even if only because it is about to come back. Ranks are fixed."""
    hint = operation.node_info.rank_hint
    held = [each.node_info.rank_hint for each in state.participants.values()]
    return hint in held or hint in state.survivors.values()


def _exit(operation: Exit, state: State, node: NodeId, view: ClockView) -> Action:
    removal = _removal(state, node, operation.reason, operation.detail)
    if removal is None:
        return FINISH
    return Action(ActionKind.ERROR_TIMEOUT) if view.now >= operation.deadline else removal


def _fail(operation: Fail, state: State, node: NodeId, view: ClockView, settings: Settings) -> Action:
    if not state.runs(node, operation.round):
        return FINISH
    if state.is_preempted:  # what has not been saved by now never will be
        return _consent(state, node)
    from rallypoint.membership.failure_streak import failure_streak_after

    ran = None if view.running_at is None else view.now - view.running_at
    streak = failure_streak_after(state, operation.cause, ran, settings)
    cause, most = operation.cause, operation.max_restarts
    if state.ledger.failures >= most:
        return Action(ActionKind.MARK_JOB_FAILED, cause=cause, max_restarts=most, ending=cause.ending)
    if 0 < settings.same_failure_limit <= streak.repeats:
        often = "once" if streak.repeats == 1 else f"{streak.repeats} times"
        detail = f"the same failure came back {often} without progress (same_failure_limit)"
        return Action(ActionKind.MARK_JOB_FAILED, cause=cause, detail=detail, max_restarts=most, ending=Ending.REPEATED)
    return Action(ActionKind.END_ROUND, reason=Reason.FAILURE, cause=cause, failure_streak=streak, max_restarts=most)


def _succeed(operation: Succeed, state: State, node: NodeId) -> Action:
    if not state.runs(node, operation.round) or node in state.succeeded:
        return FINISH
    return Action(ActionKind.MARK_SUCCEEDED)


def _drain(operation: Drain, state: State, node: NodeId) -> Action:
    if not state.runs(node, operation.round):
        return FINISH
    if state.is_preempted:
        return _consent(state, node) if operation.needs_consent else FINISH
    # Once a node has finished, new nodes are not worth the work that would be done again.
    if state.succeeded:
        return FINISH
    if not operation.needs_consent:
        return Action(ActionKind.END_ROUND, reason=Reason.DRAINED)
    if node in state.consents or not (state.wait_list or state.preempted):
        return FINISH  # reported already, or no longer requested
    return Action(ActionKind.MARK_CONSENT)


def _consent(state: State, node: NodeId) -> Action:
    return FINISH if node in state.consents else Action(ActionKind.MARK_CONSENT)


def _preempt(operation: Preempt | PreemptJob, state: State, node: NodeId) -> Action:
    if state.closed or state.is_preempted:
        return FINISH
    if isinstance(operation, PreemptJob):
        who = operation.who or name_of(state, node)
        return Action(ActionKind.MARK_JOB_PREEMPTED, seconds=operation.seconds, detail=operation.why, who=who)
    if not state.runs(node, operation.round) or state.succeeded:
        return FINISH
    said = Preemption(node, operation.seconds)
    return FINISH if state.preempted == said else Action(ActionKind.MARK_PREEMPTED, seconds=operation.seconds)


def _record_progress(operation: RecordProgress, state: State, node: NodeId) -> Action:
    known = state.progress
    new = operation.made and (operation.step < 0 or operation.step > known.step)
    in_round = new and state.runs(node, operation.round)
    reached = JobProgress(max(known.step, operation.step), state.round if in_round else known.round, reported=True)
    return FINISH if state.closed or reached == known else Action(ActionKind.MARK_PROGRESS, progress=reached)


def _close(operation: Close, state: State, view: ClockView) -> Action:
    if state.closed:
        return FINISH
    if view.now >= operation.deadline:
        return Action(ActionKind.ERROR_TIMEOUT)
    return Action(ActionKind.MARK_RENDEZVOUS_CLOSED, detail=operation.detail)


def _command(operation: Restart | Resize, state: State) -> Action:
    if isinstance(operation, Resize):
        return FINISH if state.size == operation.size else Action(ActionKind.RESIZE, size=operation.size)
    if not state.complete or state.closed or state.round != operation.round or state.is_preempted:
        return FINISH
    return Action(ActionKind.END_ROUND, reason=Reason.REQUESTED)


def _keep_alive(operation: KeepLeaseAlive, view: ClockView, settings: Settings) -> Action:
    if not _heartbeat_due(view, settings):
        return FINISH
    return Action(ActionKind.ERROR_TIMEOUT if view.now >= operation.deadline else ActionKind.KEEP_ALIVE)


def _heartbeat_due(view: ClockView, settings: Settings) -> bool:
    return view.heartbeat_at is not None and view.now >= view.heartbeat_at + settings.keep_alive_interval


def _heartbeat_or_sync(view: ClockView, settings: Settings) -> Action:
    return Action(ActionKind.KEEP_ALIVE) if _heartbeat_due(view, settings) else SYNC
