"""The sessions that watch a job and are not nodes: what they are sent, and what they command. Pure: `now` is passed in.

Laws:

1. Without watchers, the only cost is the record of events (`history`).
2. A follower is sent a snapshot after a change, at most every `_PAUSE` seconds; without a change, nothing.
3. Nodes are asked for reports when a watcher asks for the state of the job, and not more often than they can answer at
   negligible cost. A node that does not answer in time is shown with what is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.notifications import Event, Failure, verdict_sentence
from rallypoint.control.coordinator.sessions import SessionRegistry
from rallypoint.control.membership.endings import missing
from rallypoint.control.membership.rules import assign_worker_ranks, backoff_ends
from rallypoint.control.membership.state import (
    Close,
    NodeId,
    NodeInfo,
    NodeRange,
    NodeRanks,
    Operation,
    Outcome,
    Resize,
    Restart,
    Settings,
    State,
    join_names,
    known_to,
    name_of,
    names_of,
)
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectRequested,
    DrainRequested,
    NodeAnswer,
    NodeReport,
    OperatorAction,
    ReportRequested,
)
from rallypoint.control.protocol.observation import (
    CollectCommand,
    Command,
    CommandReply,
    DrainCommand,
    EventKind,
    FailureView,
    JobEvent,
    JobSummary,
    NodeState,
    NodeView,
    Phase,
    ResizeCommand,
    RestartCommand,
    Snapshot,
    StopCommand,
    WatcherNotification,
    WatcherRequest,
    WatchRequest,
    snapshot_parts,
)
from rallypoint.control.protocol.validation import MAX_NODES

_PAUSE = 0.2
"""Seconds between messages to a follower."""
_ANSWER = 0.25
"""Seconds that nodes have to report before a watcher is answered without them."""
_FRESH = 1.0
"""Seconds for which a report is not requested again."""
_REFRESH, _NODES_A_SECOND = 2.0, 100
"""Seconds between requests for reports while there is a follower; more if there are many nodes, so that the reports of
thousands cost the coordinator no more than a few of their heartbeats.
"""
_STARTED = 0.5
"""Seconds after the start of a round until reports on its workers are requested, if there is a follower."""
_COLLECT = 30.0
"""Seconds that nodes have to collect what a command requests."""
_MOST_NAMED = 8


@dataclass(slots=True)
class _Watcher:
    follows: bool = False
    wants: bool = False
    """Whether it must be sent a snapshot at the next opportunity."""


@dataclass(slots=True)
class _Collection:
    """A collection that a watcher has requested; `missing` are the nodes that have not sent all of it."""

    watcher: int
    missing: set[NodeId]
    until: float
    lost: list[NodeId] = field(default_factory=list)
    """The nodes that were lost before they had sent all of it."""


class Watchers:
    """All watchers of one job."""

    def __init__(self, job: Coordinator) -> None:
        self.sends: list[tuple[int, WatcherNotification]] = []
        """Messages to watchers, by session; delivery removes them."""
        self._job = job
        self._reports: dict[NodeId, NodeReport] = {}
        self._watchers: dict[int, _Watcher] = {}
        self._awaited: set[NodeId] = set()
        """Nodes that were asked for a report and have not answered."""
        self._asked_at, self._asked_round = -math.inf, -1
        """When nodes were last asked, and in which round: answers about another one are useless."""
        self._due_at = math.inf
        self._told_at = -math.inf
        self._collections: dict[int, _Collection] = {}
        job.parts.append(self)
        job.on_change = self.changed

    def __len__(self) -> int:
        return len(self._watchers)

    def pop_sends(self) -> list[tuple[int, WatcherNotification]]:
        """Take the messages for watchers, by session."""
        sends, self.sends = self.sends, []
        return sends

    def open(self, session: int) -> None:
        """A watcher has connected."""
        self._watchers[session] = _Watcher()

    def remove_quietest(self) -> int:
        """Remove the watcher that has said nothing for the longest time; returns its session."""
        session = next(iter(self._watchers))
        self.close(session)
        return session

    def close(self, session: int) -> bool:
        """A session has ended. Returns whether it was a watcher's."""
        for number in [each for each, asked in self._collections.items() if asked.watcher == session]:
            del self._collections[number]
        return self._watchers.pop(session, None) is not None

    def receive(self, session: int, request: WatcherRequest, now: float, refusal: str) -> None:
        """A watcher has sent a message; `refusal` is why it may not give commands, if it may not."""
        if (watcher := self._watchers.pop(session, None)) is None:
            return  # replaced
        self._watchers[session] = watcher  # as the last of all that have said something
        if isinstance(request, WatchRequest):
            self._watch(session, request.follow, now)
            return
        try:
            if refusal:
                raise CommandRefused(refusal)
            if isinstance(request, CollectCommand):
                self._collect(session, request, now)
            else:
                self.sends.append((session, CommandReply(done=True, detail=self._carry_out(request, now))))
        except CommandRefused as error:
            self.sends.append((session, CommandReply(done=False, detail=str(error))))

    def _carry_out(self, command: Command, now: float) -> str:
        """Carry out a command. Returns a text on what has happened."""
        job = self._job
        plan = plan_command(command, job.state, job.settings, job.sessions)
        job.history.add("command", job.state.round, plan.text, now)
        job.send_to([each.node for each in job.sessions], OperatorAction(command.by, plan.text, plan.size))
        if plan.drained is not None:
            job.send_to([plan.drained], DrainRequested(command.by))
        if plan.operation is not None:
            job.operate(NodeId("", 0, 0, command.by), plan.operation, now)
        return plan.text

    def changed(self, now: float) -> None:
        """The state has changed: followers must be sent a snapshot."""
        for each in self._watchers.values():
            if each.follows:
                each.wants = True
                self._due_at = min(self._due_at, max(now, self._told_at + _PAUSE))
        if self._job.state.verdict is not None:  # at once: the coordinator may end with its job
            self._tell(now)

    def _watch(self, session: int, follow: bool, now: float) -> None:
        watcher = self._watchers[session]
        watcher.follows, watcher.wants = follow, True
        self._ask_nodes(now)
        self._due_at = min(self._due_at, now + _ANSWER if self._awaited else now)

    def answered(self, node: NodeId, answer: NodeAnswer, now: float) -> None:
        """A node has answered, perhaps without having been asked."""
        if isinstance(answer, NodeReport):
            self.report(node, answer, now)
        elif isinstance(answer, CollectedPart):
            self.collected(node, answer)

    def report(self, node: NodeId, report: NodeReport, now: float) -> None:
        """A node has reported. Reports that were not requested are ignored."""
        if node not in self._awaited:
            return
        before = self._reports.get(node)
        self._reports[node] = report
        self._awaited.discard(node)
        if (
            before is None
            or before[:2] != report[:2]
            or before.steps != report.steps
            or before.progress != report.progress
        ):
            self.changed(now)
        if not self._awaited and any(each.wants and not each.follows for each in self._watchers.values()):
            self._due_at = min(self._due_at, now)

    def forget(self, node: NodeId, _now: float = 0.0) -> None:
        """A node is gone: its answers are no longer awaited."""
        self._reports.pop(node, None)
        self._awaited.discard(node)
        for number, asked in list(self._collections.items()):
            if node in asked.missing:
                asked.missing.discard(node)
                asked.lost.append(node)
                if not asked.missing:
                    self._collected(number)

    def tick(self, now: float) -> None:
        """Queue due messages, and ask nodes if there is a follower."""
        for number in [each for each, asked in self._collections.items() if asked.until <= now]:
            self._collected(number)
        if now >= self._due_at:
            self._due_at = math.inf
            self._tell(now)
        if now >= self._refresh_at():
            self._ask_nodes(now)

    def wake_at(self) -> float:
        """The time at which `tick` has something to do."""
        until = min((each.until for each in self._collections.values()), default=math.inf)
        return min(self._due_at, self._refresh_at(), until)

    def snapshot(self, now: float) -> Snapshot:
        """The snapshot of the job."""
        return snapshot_of(self._job, self._reports, now)

    # Collections from nodes

    def _collect(self, session: int, command: CollectCommand, now: float) -> None:
        job = self._job
        nodes = {each for each in nodes_with_rank(command.rank, job.state) if each in job.sessions}
        number = next(job.collections)
        job.send_to(sorted(nodes), CollectRequested(number, command.kind, command.rank))
        self._collections[number] = _Collection(session, nodes, now + _COLLECT)
        if not nodes:
            self._collected(number)

    def collected(self, node: NodeId, part: CollectedPart) -> None:
        """A node has sent a part of a collection."""
        asked = self._collections.get(part.number)
        if asked is None or node not in asked.missing:
            return
        self.sends.append((asked.watcher, part._replace(node=name_of(self._job.state, node))))
        if part.is_last:
            asked.missing.discard(node)
            if not asked.missing:
                self._collected(part.number)

    def _collected(self, number: int) -> None:
        asked = self._collections.pop(number)
        why = {f"no answer within {_COLLECT:g} s from": asked.missing, "lost meanwhile:": asked.lost}
        detail = "; ".join(f"{what} {', '.join(self._names(nodes))}" for what, nodes in why.items() if nodes)
        self.sends.append((asked.watcher, CommandReply(done=not detail, detail=detail)))

    def _names(self, nodes: Iterable[NodeId]) -> Sequence[str]:
        in_order = sorted(nodes)
        return names_of(self._job.state, in_order, _MOST_NAMED)

    # Inside

    def _refresh_at(self) -> float:
        """When nodes must be asked again; infinity while there is no follower, or no round runs."""
        state = self._job.state
        if not state.complete or state.closed or not any(each.follows for each in self._watchers.values()):
            return math.inf
        if self._asked_round != state.round and self._job.history.phase_since is not None:
            return self._job.history.phase_since + _STARTED
        return self._asked_at + max(_REFRESH, len(state.participants) / _NODES_A_SECOND)

    def _ask_nodes(self, now: float) -> None:
        job = self._job
        if not job.state.complete or (self._asked_round == job.state.round and now - self._asked_at < _FRESH):
            return
        self._asked_at, self._asked_round = now, job.state.round
        self._awaited = {each for each in job.state.participants if each in job.sessions}
        job.send_to(sorted(self._awaited), ReportRequested())

    def _tell(self, now: float) -> None:
        wanting = [session for session, each in self._watchers.items() if each.wants]
        if not wanting:
            return
        self._told_at = now
        parts = snapshot_parts(self.snapshot(now))
        for session in wanting:
            self._watchers[session].wants = False
            self.sends += [(session, part) for part in parts]


# Commands. One that cannot be done changes nothing, and the refusal says why and what to do.


class Plan(NamedTuple):
    """The effect of a command.

    `text` says what has happened, for people. `operation` is run on behalf of the operator, `drained` is the node that
    is asked to leave.
    """

    text: str
    operation: Operation | None = None
    drained: NodeId | None = None

    @property
    def size(self) -> NodeRange | None:
        """The number of nodes that rounds have from now on, if it changes."""
        return self.operation.size if isinstance(self.operation, Resize) else None


class CommandRefused(Exception):
    """The command cannot be done; one sentence says why."""


def plan_command(command: Command, state: State, settings: Settings, sessions: SessionRegistry) -> Plan:
    """The plan of a command for the present state of the job.

    Raises:
        CommandRefused: it cannot be done.
    """
    if state.verdict is not None:
        raise CommandRefused(f"the job has {state.verdict.outcome.value} already")
    if state.is_preempted and not isinstance(command, StopCommand):
        raise CommandRefused("the job is preempted and ends as soon as its workers have saved; only a stop is sooner")
    match command:
        case RestartCommand():
            return _restart(state, command.by)
        case StopCommand():
            text = f"{command.by} has stopped the job"
            return Plan(text, Close(detail=text))
        case DrainCommand():
            return _drain(command, state, sessions)
        case ResizeCommand():
            return _resize(command, state, settings, sessions)
    raise CommandRefused(f"a {type(command).__name__} is not a command that changes a job")


def _restart(state: State, by: str) -> Plan:
    if not state.complete:
        raise CommandRefused("no round is running that could be restarted; the next one is forming")
    if state.succeeded:
        raise CommandRefused("some nodes have succeeded already; a restart would do their work again")
    return Plan(f"{by} has restarted round {state.round}", Restart(state.round))


def _drain(command: DrainCommand, state: State, sessions: SessionRegistry) -> Plan:
    node = find_node(command.node, state)
    name = name_of(state, node)
    if node not in sessions:
        raise CommandRefused(f"{name} is not connected at the moment; try again when it is back")
    if node in sessions.local_nodes:
        raise CommandRefused(
            f"{name} hosts the control plane of this job, which would end with it; "
            "to end the job use 'rallyctl stop', to host it elsewhere use 'rallyctl serve' or --rdzv-backend=etcd"
        )
    return Plan(f"{command.by} drains {name}", drained=node)


def _resize(command: ResizeCommand, state: State, settings: Settings, sessions: SessionRegistry) -> Plan:
    least, most = command.min_nodes, command.max_nodes
    if settings.fixed_ranks:
        raise CommandRefused("a static job has fixed ranks; start it with --rdzv-backend=c10d to resize it")
    if not 1 <= least <= most <= MAX_NODES:
        raise CommandRefused(
            f"{least}:{most} is not a range of nodes; give MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}"
        )
    nodes = known_to(state)
    if not nodes or any(node not in sessions for node in nodes):
        raise CommandRefused("not all nodes of the job have come to this coordinator; try again when they have")
    if (least, most) == (settings.min_nodes, settings.max_nodes):
        raise CommandRefused(f"the job has {least}:{most} nodes already")
    text = f"{command.by} has resized the job from {settings.min_nodes}:{settings.max_nodes} to {least}:{most} nodes"
    return Plan(text, Resize(NodeRange(least, most)))


def find_node(wanted: str, state: State) -> NodeId:
    """The node with a name, host, address, pid@host or group rank.

    Raises:
        CommandRefused: there is none, or more than one.
    """
    nodes = [node for node in known_to(state) if not node.is_placeholder]
    found = [node for node in nodes if wanted in _names(state, node)]
    if len(found) == 1:
        return found[0]
    if found:
        which = join_names([f"{each.pid}@{each}" for each in found[:_MOST_NAMED]])
        raise CommandRefused(f"{wanted!r} names {len(found)} nodes; name one of them: {which}")
    have = join_names(names_of(state, nodes, _MOST_NAMED)) or "none"
    raise CommandRefused(f"the job has no node {wanted!r}; it has {have}")


def nodes_with_rank(rank: int, state: State) -> list[NodeId]:
    """The participants of the running round; with a `rank` that is not negative, the one whose worker has it.

    Raises:
        CommandRefused: no round runs, or it has no such rank.
    """
    if not state.complete:
        raise CommandRefused("no round is running, so there are no workers")
    in_order = sorted(state.participants.items(), key=lambda entry: entry[1].rank)
    if rank < 0:
        return [node for node, _ in in_order]
    ends = itertools.accumulate(each.node_info.local_world_size for _, each in in_order)
    for place, ((node, each), end) in enumerate(zip(in_order, ends, strict=True)):
        if place != each.rank:
            raise CommandRefused(
                f"a node with lower ranks has succeeded and left, so it is not known which node has {rank}"
            )
        if rank < end:
            return [node]
    raise CommandRefused(f"the job has no rank {rank}; see 'rallyctl status'")


def _names(state: State, node: NodeId) -> set[str]:
    names = {node.host, node.addr, f"{node.pid}@{node}", name_of(state, node)}
    place = state.participants.get(node)
    if place is not None and state.complete:
        names.add(str(place.rank))
    return names - {""}


# The snapshot, made from the state, the sessions and the reports of nodes.


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


def snapshot_of(job: Coordinator, reports: Mapping[NodeId, NodeReport], now: float) -> Snapshot:
    """The snapshot of a job, with the last reports of its nodes."""
    state, settings, history, view = job.state, job.settings, job.history, job.clock_view(now)
    short = 0 if state.complete else max(0, settings.min_nodes - len(state.participants))
    held_back = max(0.0, backoff_ends(state, view) - now) if state.restart_delay and not state.complete else 0.0
    return Snapshot(
        job=settings.run_id,
        incarnation=job.incarnation,
        phase=phase_of(state, settings),
        phase_for=0.0 if history.phase_since is None else now - history.phase_since,
        round=state.round,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        missing=short,
        expected=() if state.complete else missing(state, settings),
        nodes=tuple(_nodes(state, job.sessions, reports, now)),
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
