"""Snapshots of a job for watchers: the copied view, and the snapshot created from it. Pure.

Laws:

1. Taking a `JobView` is fast, since the nodes wait: it refers to immutable data, and copies the rest. All other work is
   done in slices, between which the loop serves the nodes.
2. A job with up to `SHOWN_NODES` nodes has a row per node. For a larger job, the snapshot has the nodes with problems,
   worst first, and a few others; totals cover all nodes.
3. Results that depend only on a round's members or its nodes' reports are computed once for all snapshots.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from typing import NamedTuple, TypeVar

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.notifications import Event, Failure, JobHistory, missing_nodes, verdict_sentence
from rallypoint.control.membership.endings import missing
from rallypoint.control.membership.rules import ClockView, backoff_ends, number_fitting
from rallypoint.control.membership.state import NodeId, NodeInfo, Outcome, Participant, Settings, State, name_of
from rallypoint.control.protocol.messages import NodeReport
from rallypoint.failures.cause import Ending
from rallypoint.observe.watching.messages import (
    PAGE_NODES,
    SHOWN_NODES,
    EventKind,
    FailureView,
    JobEvent,
    JobPhase,
    JobSummary,
    MemberState,
    NodeView,
    Snapshot,
    Steps,
    Straggler,
    Totals,
)

_LONGEST_DETAIL = 200
"""Maximum number of characters about a job's end in a list."""
_LEAST_SHOWN = 8
"""Number of rows for nodes without problems in a large job."""
_MOST_BEHIND = 100
"""Maximum number of ranks in a snapshot that are behind the others."""
_LAGS = 2
"""Show a node that is this many steps behind the median: a worker may report a step slightly after the others."""
_SILENT = 0.75
"""The fraction of the lease after which to show a silent node: longer than any pause between heartbeats."""


_SLICE = 250
"""Number of nodes per slice."""

T = TypeVar("T")
_Slices = Generator[None, None, T]
Making = _Slices[Snapshot]
"""An unfinished snapshot: each step is a slice of some hundred microseconds, and the last one returns it."""


def reported_round(state: State) -> int:
    """The round whose workers nodes report on: the running one, or the ended one while nodes wait for the next; -1 for
    none."""
    if state.complete:
        return state.round
    return -1 if state.ended is None or state.verdict is not None else state.ended.round


class _Report(NamedTuple):
    """A report and when it arrived."""

    report: NodeReport
    at: float

    def with_ages(self, now: float) -> NodeReport:
        """The report with ages as of now."""
        since = now - self.at

        def age_now(age: float) -> float:
            return age if age < 0 else age + since

        return self.report._replace(
            progress_age=age_now(self.report.progress_age),
            first_step_age=age_now(self.report.first_step_age),
            output_ages=tuple(map(age_now, self.report.output_ages)),
            ended=tuple((rank, code, age_now(age)) for rank, code, age in self.report.ended),
        )


@dataclass(slots=True)
class NodeReports:
    """Each node's last report."""

    by_node: dict[NodeId, _Report] = field(default_factory=dict)
    changes: int = 0
    """The number of changes."""

    def add(self, node: NodeId, report: NodeReport, now: float) -> NodeReport | None:
        """Store a node's report. Returns its previous one."""
        before = self.by_node.get(node)
        self.by_node[node] = _Report(report, now)
        self.changes += 1
        return None if before is None else before.report

    def forget(self, node: NodeId) -> None:
        self.changes += self.by_node.pop(node, None) is not None


class JobView(NamedTuple):
    """Data for all snapshots of one moment."""

    now: float
    incarnation: str
    state: State
    settings: Settings
    clock: ClockView
    phase_since: float | None
    age: float
    failures: tuple[Failure, ...]
    events: tuple[Event, ...]
    last_heard: Callable[[], Mapping[NodeId, float]]
    reports: Mapping[NodeId, _Report]
    reports_changes: int
    drained: Mapping[NodeId, str]
    """Nodes that were asked to leave, and by which operator."""
    known: tuple[str, str] = ("", "")
    """See `JobHistory.known`."""
    changes: int = 0
    """See `Snapshot.changes`."""

    @classmethod
    def from_coordinator(
        cls, job: Coordinator, reports: NodeReports, now: float, drained: Mapping[NodeId, str] = {}, changes: int = 0
    ) -> JobView:
        """Take the current view of a job."""
        return cls(
            now=now,
            incarnation=job.incarnation,
            state=job.state,
            settings=job.settings,
            clock=job.clock_view(now),
            phase_since=job.history.phase_since,
            age=age_of(job.history, now, job.state),
            failures=tuple(job.history.failures),
            events=tuple(job.history.events),
            last_heard=job.sessions.copy_last_heard(),
            reports=dict(reports.by_node),
            reports_changes=reports.changes,
            drained=dict(drained),
            known=job.history.known,
            changes=changes,
        )


class _Place(NamedTuple):
    """A node in one of the state's lists. A participant of the running round has its ranks, -1 if unknown."""

    node: NodeId
    kind: MemberState
    info: NodeInfo | None = None
    group_rank: int = -1
    first_rank: int = -1


class _Reported(NamedTuple):
    """The reports on a round, combined."""

    nodes: int
    least_step: int
    most_step: int
    in_place_of: tuple[str, ...]
    steps: Steps | None
    command: str
    log_folder: str
    lagging: tuple[NodeId, ...]
    """Nodes with ranks more than one step behind, the last one first."""


class _Members(NamedTuple):
    """The participants of a round in order, with derived data, and the number of their workers."""

    of: Mapping[NodeId, object]
    complete: bool
    places: Sequence[_Place]
    workers: int


class SnapshotMaker:
    """Creates the snapshots of one job, slice by slice. Its caches are replaced as a whole, so several snapshots can be
    in progress.
    """

    def __init__(self) -> None:
        self._members = _Members({}, False, (), 0)
        self._reported: tuple[int, int, Sequence[_Place], _Reported] | None = None

    def row(self, view: JobView, node: NodeId) -> Making:
        """The snapshot with this node's row."""
        members = yield from self._members_of(view.state)
        every = _all_places(view.state, members)
        yield
        places = [place for place in every if place.node == node]
        return (yield from self._snapshot(view, members, view.last_heard(), places, len(every) - len(places)))

    def page(self, view: JobView, first: int) -> Making:
        """The snapshot with a page of rows, starting at `first`."""
        members, end = (yield from self._members_of(view.state)), first + PAGE_NODES
        every = _all_places(view.state, members)
        yield
        shown, left = every[first:end], max(0, len(every) - end)
        return (yield from self._snapshot(view, members, view.last_heard(), shown, left))

    def snapshot(self, view: JobView) -> Making:
        """The snapshot for requests without specific rows."""
        members = yield from self._members_of(view.state)
        heard = view.last_heard()
        yield
        every = _all_places(view.state, members)
        shown: Sequence[_Place] = every
        if len(every) > SHOWN_NODES:
            reported = yield from self._current_reports(view, members)
            shown = yield from _shown_places(view, every, heard, reported.lagging)
        return (yield from self._snapshot(view, members, heard, shown, len(every) - len(shown)))

    def _members_of(self, state: State) -> _Slices[_Members]:
        known = self._members
        if known.of is not state.participants or known.complete != state.complete:
            places = yield from _participants(state)
            workers = sum(place.info.local_world_size for place in places if place.first_rank >= 0 and place.info)
            known = self._members = _Members(state.participants, state.complete, places, workers)
            yield
        return known

    def _current_reports(self, view: JobView, members: _Members) -> _Slices[_Reported]:
        key, known = (view.reports_changes, view.state.round), self._reported
        if known is None or known[:2] != key or known[2] is not members.places:
            reported = yield from _reported(view, members.places)
            known = self._reported = (*key, members.places, reported)
        return known[3]

    def _snapshot(
        self,
        view: JobView,
        members: _Members,
        heard: Mapping[NodeId, float],
        places: Sequence[_Place],
        not_shown: int,
    ) -> Making:
        state, settings, now = view.state, view.settings, view.now
        reported = yield from self._current_reports(view, members)
        short = 0 if state.complete else max(0, settings.min_nodes - number_fitting(state, settings))
        backs_off = state.restart_delay and not state.complete
        totals = _totals(state, heard, reported, members.workers, view.known)
        yield
        rows: list[NodeView] = []
        for at in range(0, len(places), _SLICE):
            rows += [_row(view, heard, place) for place in places[at : at + _SLICE]]
            yield
        return Snapshot(
            job=settings.run_id,
            incarnation=view.incarnation,
            phase=phase_of(state, settings),
            phase_for=0.0 if view.phase_since is None else now - view.phase_since,
            round=state.round,
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            missing=short,
            expected=() if state.complete else missing(state, settings),
            nodes=tuple(rows),
            not_shown=not_shown,
            totals=totals,
            ended_rounds=state.ledger._replace(failures=_restarts_used(state)),
            max_restarts=state.max_restarts,
            backoff=max(0.0, backoff_ends(state, view.clock) - now) if backs_off else 0.0,
            failures=_failures(view.failures, now),
            events=tuple(_event(event, now) for event in view.events),
            detail="" if state.verdict is None else verdict_sentence(state.verdict),
            ending=_ending(state),
            age=view.age,
            removed=() if state.complete else missing_nodes(state, view.clock),
            changes=view.changes,
        )


def at_once(making: _Slices[T]) -> T:
    """Run all slices, one after another."""
    try:
        while True:
            next(making)
    except StopIteration as end:
        result: T = end.value
        return result


def _ending(state: State) -> Ending | None:
    verdict = state.verdict
    return None if verdict is None or verdict.outcome is Outcome.SUCCEEDED else verdict.ending


_PHASE_OF_OUTCOME = {
    Outcome.SUCCEEDED: JobPhase.SUCCEEDED,
    Outcome.FAILED: JobPhase.FAILED,
    Outcome.STOPPED: JobPhase.STOPPED,
}


def _restarts_used(state: State) -> int:
    """The number of restarts after failures. The ledger also counts the failure that ended the job, which used none."""
    failed = state.verdict is not None and state.verdict.outcome is Outcome.FAILED
    return max(0, state.ledger.failures - failed)


def phase_of(state: State, settings: Settings) -> JobPhase:
    """The phase of the job."""
    if state.verdict is not None:
        return _PHASE_OF_OUTCOME[state.verdict.outcome]
    if state.complete:
        return JobPhase.RUNNING
    if number_fitting(state, settings) < settings.min_nodes:
        return JobPhase.WAITING
    return JobPhase.HELD_BACK if state.restart_delay else JobPhase.FORMING


def age_of(history: JobHistory, now: float, state: State) -> float:
    """Seconds since the job became known here; for an ended job, its duration."""
    if history.began is None or history.phase_since is None:
        return 0.0
    return (now if state.verdict is None else history.phase_since) - history.began


def summary_of(state: State, settings: Settings, history: JobHistory, now: float) -> JobSummary:
    """A job's entry in a list of jobs."""
    return JobSummary(
        job=settings.run_id,
        phase=phase_of(state, settings),
        round=state.round,
        nodes=len(state.participants),
        max_nodes=settings.max_nodes,
        phase_for=0.0 if history.phase_since is None else now - history.phase_since,
        age=age_of(history, now, state),
        detail="" if state.verdict is None else verdict_sentence(state.verdict)[:_LONGEST_DETAIL],
        restarts=_restarts_used(state),
    )


def _all_places(state: State, members: _Members) -> Sequence[_Place]:
    """The nodes in all lists; those in the round are ordered by rank."""
    return [
        *members.places,
        *(_Place(node, MemberState.WAITING, info) for node, info in state.wait_list.items()),
        *(_Place(node, MemberState.SPARE, info) for node, info in state.redundancy_list.items()),
        *(_Place(node, MemberState.EXPECTED, None, rank) for node, rank in state.survivors.items()),
    ]


def _shown_places(
    view: JobView, every: Sequence[_Place], heard: Mapping[NodeId, float], lagging: Sequence[NodeId]
) -> _Slices[Sequence[_Place]]:
    """Select the nodes to show: by kind of problem, then the first nodes."""
    state, silent_since = view.state, view.now - _SILENT * view.settings.lease
    silent = [(at, node) for node, at in heard.items() if at <= silent_since]
    yield
    kinds: tuple[Iterable[NodeId], ...] = (
        filterfalse(heard.__contains__, state.participants),
        state.survivors,
        heapq.nsmallest(SHOWN_NODES, state.quiet),
        (node for _, node in heapq.nsmallest(SHOWN_NODES, silent)),
        () if state.preempted is None else (state.preempted.node,),
        view.drained,
        lagging,
        state.wait_list,
        state.redundancy_list,
    )
    shown: dict[NodeId, None] = {}
    for node in chain.from_iterable(kinds):
        if len(shown) == SHOWN_NODES:
            break
        shown[node] = None
    yield
    places = {place.node: place for place in every if place.node in shown} if shown else {}
    for place in every[:_LEAST_SHOWN]:
        if len(places) < _LEAST_SHOWN:
            shown[place.node], places[place.node] = None, place
    yield
    return [places[node] for node in shown if node in places]


def _rank(entry: tuple[NodeId, Participant]) -> int:
    return entry[1].rank


def _rank_and_node(entry: tuple[NodeId, Participant]) -> tuple[int, NodeId]:
    """A sort key. While a round is forming, ranks are the previous ones, and new nodes have none."""
    return entry[1].rank, entry[0]


def _participants(state: State) -> _Slices[Sequence[_Place]]:
    in_order = sorted(state.participants.items(), key=_rank if state.complete else _rank_and_node)
    yield
    places: list[_Place] = []
    base_rank = 0  # like `assign_worker_ranks`, which would process all of them at once
    for place, (node, participant) in enumerate(in_order):
        # If an earlier node succeeded and left, we do not know how many workers it had.
        first = base_rank if state.complete and place == participant.rank else -1
        base_rank += participant.node_info.local_world_size
        rank = participant.rank if state.complete else -1
        places.append(_Place(node, MemberState.PARTICIPANT, participant.node_info, rank, first))
        if place % _SLICE == 0:
            yield
    return places


def _row(view: JobView, heard: Mapping[NodeId, float], place: _Place) -> NodeView:
    node, kind, info, group_rank, first_rank = place
    state, heard_at = view.state, heard.get(node, math.inf)
    report = view.reports.get(node)
    runs = kind is MemberState.PARTICIPANT and state.complete
    is_known = report is not None and kind is MemberState.PARTICIPANT and report.report.round == reported_round(state)
    return NodeView(
        name=name_of(state, node),
        host=node.host,
        address=node.addr,
        pid=node.pid,
        state=kind,
        connected=node in heard,
        silent_for=-1.0 if heard_at == math.inf else max(0.0, view.now - heard_at),
        group_rank=group_rank,
        first_rank=first_rank,
        workers=0 if info is None else info.local_world_size,
        role="" if info is None else info.role,
        succeeded=runs and node in state.succeeded,
        report=report.with_ages(view.now) if report and is_known else None,
        quiet=node in state.quiet,
        drained_by=view.drained.get(node, ""),
        domain="" if info is None else info.domain,
        waits_for="" if runs or info is None else _what_it_waits_for(state, info, view.settings),
    )


def _what_it_waits_for(state: State, info: NodeInfo, settings: Settings) -> str:
    if settings.segment < 2:
        return ""
    from rallypoint.control.membership.segments import what_a_node_waits_for

    return what_a_node_waits_for(state, info.domain, settings)


def _reported(view: JobView, places: Sequence[_Place]) -> _Slices[_Reported]:
    if not view.state.complete:
        return _Reported(0, -1, -1, (), None, "", "", ())
    reports: list[tuple[_Place, NodeReport]] = []
    for at in range(0, len(places), 4 * _SLICE):
        reports += [
            (place, report.report)
            for place in places[at : at + 4 * _SLICE]
            if (report := view.reports.get(place.node)) is not None and report.report.round == view.state.round
        ]
        yield
    reached = [report.progress for _, report in reports if report.progress >= 0]
    steps = [(place, report.steps) for place, report in reports if place.first_rank >= 0 and report.steps]
    yield
    every = sorted(chain.from_iterable(local_steps for _, local_steps in steps))
    every = every[bisect_left(every, 0) :]
    yield
    behind: list[tuple[int, int, _Place]] = []
    if len(every) > 1:
        median = every[len(every) // 2]
        for at in range(0, len(steps), 4 * _SLICE):
            late = (
                (step, place.first_rank + local, place)
                for place, local_steps in steps[at : at + 4 * _SLICE]
                if min(local_steps) < median
                for local, step in enumerate(local_steps)
                if 0 <= step < median
            )
            behind = heapq.nsmallest(_MOST_BEHIND, chain(behind, late), key=lambda entry: entry[:2])
            yield
    first = next((report for place, report in reports if place.group_rank == 0), NodeReport(-1))
    in_place_of = tuple(sorted({report.in_place_of for _, report in reports if report.in_place_of}))
    yield
    return _Reported(
        len(reports),
        min(reached, default=-1),
        max(reached, default=-1),
        in_place_of,
        _steps(view.state, every, behind),
        first.command,
        first.log_folder,
        tuple(place.node for step, _, place in behind if step <= median - _LAGS),
    )


def _totals(
    state: State, heard: Mapping[NodeId, float], reported: _Reported, workers: int, known: tuple[str, str]
) -> Totals:
    """Count all nodes. `known` has the command and log folder that were reported last."""
    connected = sum(map(heard.__contains__, state.participants))
    succeeded = sum(node in heard for node in state.succeeded if node in state.participants) if state.complete else 0
    return Totals(
        participant=connected - succeeded,
        unreachable=len(state.participants) - connected,
        succeeded=succeeded,
        waiting=len(state.wait_list),
        spare=len(state.redundancy_list),
        expected=len(state.survivors),
        quiet=len(state.quiet),
        reported=reported.nodes,
        workers=workers,
        least_step=reported.least_step,
        most_step=reported.most_step,
        in_place_of=reported.in_place_of,
        steps=reported.steps,
        command=reported.command or known[0],
        log_folder=reported.log_folder or known[1],
    )


def _steps(state: State, every: Sequence[int], behind: Sequence[tuple[int, int, _Place]]) -> Steps | None:
    if len(every) < 2:
        return None
    median = every[len(every) // 2]
    named = (Straggler(rank, name_of(state, place.node), step, median - step) for step, rank, place in behind)
    return Steps(median, len(every), bisect_left(every, median), tuple(named))


def _failures(failures: Sequence[Failure], now: float) -> tuple[FailureView, ...]:
    views = [_failure(failure, now) for failure in failures]
    if views and (cause := failures[-1][3]) is not None:
        views[-1] = views[-1]._replace(traceback=cause.traceback)
    return tuple(views)


def _failure(failure: Failure, now: float) -> FailureView:
    at, round_, node, cause, detail = failure
    if cause is None:
        return FailureView(
            seconds_ago=now - at,
            round=round_,
            node=node,
            host=node,
            rank=-1,
            local_rank=-1,
            pid=0,
            exitcode=0,
            message=detail,
        )
    return FailureView(
        seconds_ago=now - at,
        round=round_,
        node=node,
        host=cause.host,
        rank=cause.rank,
        local_rank=cause.local_rank,
        pid=cause.pid,
        exitcode=cause.exitcode,
        message=cause.headline,
    )


def _event(event: Event, now: float) -> JobEvent:
    at, number, kind, round_, text, node = event
    return JobEvent(number, now - at, EventKind(kind), round_, text, node)
