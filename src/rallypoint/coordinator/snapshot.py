"""The snapshot of a job, made from the state, the sessions and the reports of nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rallypoint.coordinator.history import Event, Failure, JobHistory, verdict_sentence
from rallypoint.coordinator.session_registry import SessionRegistry
from rallypoint.membership.endings import missing
from rallypoint.membership.rules import ClockView, backoff_ends
from rallypoint.membership.state import NodeId, NodeInfo, Outcome, Settings, State, name_of
from rallypoint.protocol.observation import (
    EventKind,
    FailureView,
    JobEvent,
    JobSummary,
    NodeState,
    NodeView,
    Phase,
    Snapshot,
)
from rallypoint.protocol.operator_messages import NodeReport
from rallypoint.ranks.assign import NodeRanks, assign_worker_ranks

_PHASE_OF_OUTCOME = {
    Outcome.SUCCEEDED: Phase.SUCCEEDED,
    Outcome.FAILED: Phase.FAILED,
    Outcome.STOPPED: Phase.STOPPED,
}


def phase_of(state: State, settings: Settings) -> Phase:
    """The phase of the job."""
    if state.verdict is not None:
        return _PHASE_OF_OUTCOME[state.verdict.outcome]
    if state.complete:
        return Phase.RUNNING
    if len(state.participants) < settings.min_nodes:
        return Phase.WAITING
    return Phase.HELD_BACK if state.restart_delay else Phase.FORMING


def summary_of(state: State, settings: Settings) -> JobSummary:
    """One entry of a list of jobs."""
    nodes = len(state.participants)
    return JobSummary(settings.run_id, phase_of(state, settings), state.round, nodes, settings.max_nodes)


def snapshot_of(
    state: State,
    settings: Settings,
    incarnation: str,
    sessions: SessionRegistry,
    reports: Mapping[NodeId, NodeReport],
    history: JobHistory,
    view: ClockView,
) -> Snapshot:
    """The snapshot of the job at `view.now`.

    Args:
        state: of the job.
        settings: of the job.
        incarnation: of the coordinator.
        sessions: the connected nodes, and when they were last heard.
        reports: the last reports of nodes.
        history: the events of the job.
        view: the clock view.
    """
    now = view.now
    short = 0 if state.complete else max(0, settings.min_nodes - len(state.participants))
    held_back = max(0.0, backoff_ends(state, view) - now) if state.restart_delay and not state.complete else 0.0
    return Snapshot(
        job=settings.run_id,
        incarnation=incarnation,
        phase=phase_of(state, settings),
        phase_for=0.0 if history.phase_since is None else now - history.phase_since,
        round=state.round,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        missing=short,
        expected=() if state.complete else missing(state, settings),
        nodes=tuple(_nodes(state, sessions, reports, now)),
        ended_rounds=state.ledger,
        max_restarts=state.max_restarts,
        backoff=held_back,
        failures=tuple(_failure(each, now) for each in history.failures),
        events=tuple(_event(each, now) for each in history.events),
        detail="" if state.verdict is None else verdict_sentence(state.verdict),
    )


def _nodes(
    state: State, sessions: SessionRegistry, reports: Mapping[NodeId, NodeReport], now: float
) -> Iterator[NodeView]:
    in_order = sorted(state.participants.items(), key=lambda entry: (entry[1].rank, entry[0]))
    ranks = assign_worker_ranks([(each.node_info.role, each.node_info.local_world_size) for _, each in in_order])
    for place, ((node, each), own) in enumerate(zip(in_order, ranks, strict=True)):
        view = _node(state, sessions, node, NodeState.PARTICIPANT, each.node_info, now)
        if state.complete:
            view = _in_round(view, each.rank, own, node in state.succeeded, reports.get(node), state.round)
        if place != each.rank:  # an earlier one has succeeded and left, and its number of workers is not known
            view = view._replace(first_rank=-1)
        yield view
    for node, info in state.wait_list.items():
        yield _node(state, sessions, node, NodeState.WAITING, info, now)
    for node, info in state.redundancy_list.items():
        yield _node(state, sessions, node, NodeState.SPARE, info, now)
    for node, rank in state.survivors.items():
        yield _node(state, sessions, node, NodeState.EXPECTED, None, now)._replace(group_rank=rank)


def _node(
    state: State, sessions: SessionRegistry, node: NodeId, kind: NodeState, info: NodeInfo | None, now: float
) -> NodeView:
    silence = sessions.silence(node, now)
    return NodeView(
        name_of(state, node),
        node.host,
        node.addr,
        node.pid,
        kind,
        connected=node in sessions,
        silent_for=-1.0 if silence is None else silence,
        workers=0 if info is None else info.local_world_size,
        role="" if info is None else info.role,
    )


def _in_round(
    view: NodeView, rank: int, ranks: NodeRanks, succeeded: bool, report: NodeReport | None, round_: int
) -> NodeView:
    fresh = report if report is not None and report.round == round_ else None
    return view._replace(group_rank=rank, first_rank=ranks.base_rank, succeeded=succeeded, report=fresh)


def _failure(failure: Failure, now: float) -> FailureView:
    at, round_, node, cause, detail = failure
    if cause is None:
        return FailureView(now - at, round_, node, node, -1, -1, 0, 0, detail)
    ranks = cause.rank, cause.local_rank
    return FailureView(now - at, round_, node, cause.host, *ranks, cause.pid, cause.exitcode, cause.headline)


def _event(event: Event, now: float) -> JobEvent:
    at, number, kind, round_, text, node = event
    return JobEvent(number, now - at, EventKind(kind), round_, text, node)
