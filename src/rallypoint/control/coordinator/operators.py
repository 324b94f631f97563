"""The sessions that watch a job and are not nodes: what they are sent, and what they command. Pure: `now` is passed in.

Laws:

1. Without watchers, the only cost is the record of events (`history`).
2. A watcher has one unanswered request for a snapshot: the next one takes its place. So many requests cost no more than
   one.
3. All who wait are answered with one snapshot. That of a large job is made in slices, one a tick, between which nodes
   are served.
4. A watcher that follows is sent the end of the job without a request: an embedded coordinator may be gone before
   the next one arrives.
5. Nodes are asked for reports when a watcher asks for the state of the job, and not more often than they can answer at
   negligible cost; many are asked in waves. A node that does not answer in time is shown with what is known.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from rallypoint.control.coordinator.collection import LIMITS, Collection, room_for_each
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRegistry
from rallypoint.control.coordinator.snapshots import JobView, Making, NodeReports, SnapshotMaker, at_once
from rallypoint.control.membership.state import (
    Close,
    NodeId,
    NodeRange,
    Operation,
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
    CollectKind,
    CollectRequested,
    DrainRequested,
    Fault,
    FaultRequested,
    NodeAnswer,
    NodeReport,
    OperatorAction,
    ReportRequested,
    Taken,
)
from rallypoint.control.protocol.observation import (
    SHOWN_NODES,
    CollectCommand,
    Command,
    CommandReply,
    DrainCommand,
    EventKind,
    FaultCommand,
    ResizeCommand,
    RestartCommand,
    Snapshot,
    StopCommand,
    WatcherRequest,
    WatchRequest,
    snapshot_parts,
)
from rallypoint.control.protocol.ranges import MAX_NODES

_PAUSE, _LONGEST_PAUSE, _ROWS_A_SECOND = 0.2, 2.0, 12_500
"""Seconds between answers to those who follow; more if there are many nodes, which a snapshot has to count."""
_UNCHANGED = 1.0
"""Seconds after which they are answered without a change, if the pause is shorter."""
_ANSWER = 0.25
"""Seconds that nodes have to report before a watcher is answered without them."""
_FRESH, _FRESH_NODES = 1.0, 256
"""Seconds for which a report is not requested again: a second for so many nodes, but one at least."""
_WAVE, _WAVES_APART = 1024, 0.2
"""The number of nodes that are asked for reports at once, and the seconds until the next ones are: the heartbeats of
all must not wait for the answers of all.
"""
_MOST_NAMED = 8
_MOST_COLLECTIONS = 4
"""Collections of one watcher at a time: each of them is looked at for each answer of a node."""
_MOST_OF_LOGS = 1024 * 1024
"""Bytes of one node's logs that are asked for at once, if there are few nodes."""


@dataclass(slots=True)
class _Watcher:
    request: WatchRequest = field(default_factory=WatchRequest)
    """Its last request."""
    due_at: float = math.inf
    """When that is answered at the latest; infinity if it was, or if there is none."""
    view: JobView | None = None
    """What the last answer was made of: the other rows of a large job come from the same moment."""

    @property
    def follows(self) -> bool:
        """Whether it asks again when it has read the answer."""
        return self.request.after >= 0


class _Collected(NamedTuple):
    """A collection that a watcher has requested."""

    watcher: int
    nodes: Collection
    ranks: tuple[int, ...] = ()


class WatcherSessions:
    """All watchers of one job."""

    def __init__(self, job: Coordinator) -> None:
        self._job = job
        self._reports = NodeReports()
        self._maker = SnapshotMaker()
        self._watchers: dict[int, _Watcher] = {}
        self._awaited: set[NodeId] = set()
        """Nodes that were asked for a report and have not answered."""
        self._asked_at, self._asked_round = -math.inf, -1
        """When nodes were last asked, and in which round: answers about another one are useless."""
        self._to_ask: Iterator[NodeId] = iter(())
        """The nodes of that round that are asked next, at `_ask_at`."""
        self._ask_at = math.inf
        self._making: tuple[Sequence[int], Making] | None = None
        """The sessions that are answered now, and the snapshot in the making."""
        self._changes = 1
        """The number of the last change: `Snapshot.changes`."""
        self._told_at = -math.inf
        """When a snapshot of no rows in particular was last begun."""
        self._collections: dict[int, _Collected] = {}
        self._drained: dict[NodeId, str] = {}
        """Nodes that were asked to leave, and by whom."""
        self._followed_round = -1
        """The round whose nodes are followed."""
        job.parts.append(self)
        job.on_change = self.changed

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def is_collecting(self) -> bool:
        """Whether nodes are to answer a watcher."""
        return bool(self._collections)

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
        for number in [number for number, collection in self._collections.items() if collection.watcher == session]:
            del self._collections[number]
        return self._watchers.pop(session, None) is not None

    def receive(self, session: int, request: WatcherRequest, now: float, refusal: str) -> None:
        """A watcher has sent a message; `refusal` is why it may not give commands, if it may not."""
        if (watcher := self._watchers.pop(session, None)) is None:
            return  # replaced
        self._watchers[session] = watcher  # as the last of all that have said something
        if isinstance(request, Taken):
            self._on_read(session, request.number, now)
            return
        if isinstance(request, WatchRequest):
            self._watch(watcher, request, now)
            return
        try:
            if refusal:
                raise CommandRefused(refusal)
            if isinstance(request, CollectCommand):
                self._collect(session, request, now)
            else:
                self._job.send(session, CommandReply(done=True, detail=self._carry_out(request, now)))
        except CommandRefused as error:
            self._job.send(session, CommandReply(done=False, detail=str(error)))

    def _carry_out(self, command: Command, now: float) -> str:
        """Carry out a command. Returns a text on what has happened."""
        job = self._job
        plan = plan_command(command, job.state, job.settings, job.sessions)
        job.history.add(plan.kind.value, job.state.round, plan.text, now)
        job.send_to([session.node for session in job.sessions], OperatorAction(command.by, plan.text, plan.size))
        if plan.request is not None:
            node, request = plan.request
            if isinstance(request, DrainRequested):
                self._drained[node] = command.by
            job.send_to([node], request)
        self.changed(now)
        if plan.operation is not None:
            job.operate(NodeId("", 0, 0, command.by), plan.operation, now)
        return plan.text

    def changed(self, now: float) -> None:
        """The state has changed: answer those who follow."""
        self._changes += 1
        if self._collections:
            self._follow_nodes(now)
        is_over = self._job.state.verdict is not None
        for watcher in self._watchers.values():
            if watcher.follows and is_over:
                watcher.request, watcher.due_at = WatchRequest(), now
            elif watcher.follows and watcher.due_at < math.inf:
                watcher.due_at = min(watcher.due_at, max(now, self._told_at + self._pause()))

    def _pause(self) -> float:
        state = self._job.state
        nodes = len(state.participants) + len(state.survivors)
        return min(_LONGEST_PAUSE, max(_PAUSE, nodes / _ROWS_A_SECOND))

    def _watch(self, watcher: _Watcher, request: WatchRequest, now: float) -> None:
        watcher.request, watcher.due_at = request, now
        if request.has_rows:
            return
        self._ask_nodes(now)
        if request.after > 0:
            least = 0.0 if request.after < self._changes else _UNCHANGED
            watcher.due_at = max(now, self._told_at + max(least, self._pause()))
        elif self._awaited:
            watcher.due_at = now + _ANSWER

    def _on_read(self, session: int, number: int, now: float) -> None:
        """A watcher has read all that a node has sent for a collection."""
        if (collection := self._collections.get(number)) is not None and collection.watcher == session:
            collection.nodes.on_read(now)
            self._end_collections()

    def on_answer(self, node: NodeId, answer: NodeAnswer, now: float) -> None:
        """A node has answered, perhaps without having been asked."""
        if isinstance(answer, NodeReport):
            self.report(node, answer, now)
        elif isinstance(answer, CollectedPart):
            self.on_part(node, answer, now)

    def report(self, node: NodeId, report: NodeReport, now: float) -> None:
        """A node has reported. Reports that were not requested are ignored."""
        if node not in self._awaited:
            return
        before = self._reports.add(node, report, now)
        self._job.history.reported(report.age, report.command, report.log_folder, now)
        self._awaited.discard(node)
        if (
            before is None
            or before[:2] != report[:2]
            or before.steps != report.steps
            or before.progress != report.progress
        ):
            self.changed(now)
        if not self._awaited and self._ask_at == math.inf:
            for watcher in self._watchers.values():
                if watcher.due_at < math.inf and not watcher.follows:
                    watcher.due_at = now

    def forget(self, node: NodeId, now: float) -> None:
        """A node is gone: its answers are no longer awaited."""
        self._reports.forget(node)
        self._awaited.discard(node)
        self._drained.pop(node, None)
        for collection in self._collections.values():
            collection.nodes.forget(node, now)
        self._end_collections()

    def tick(self, now: float) -> None:
        """Queue due messages, and ask more nodes for their reports."""
        for collection in self._collections.values():
            if collection.nodes.wake_at() <= now:
                collection.nodes.tick(now)
        self._end_collections()
        if now >= self._ask_at:
            self._ask_more(now)
        while self._making is not None or now >= self._due_at():
            self._answer_some(now)
            if self._job.state.verdict is None:  # else all at once: the coordinator may end with its job
                break

    def wake_at(self) -> float:
        """The time at which `tick` has something to do."""
        until = min((collection.nodes.wake_at() for collection in self._collections.values()), default=math.inf)
        return min(self._due_at() if self._making is None else -math.inf, self._ask_at, until)

    def _due_at(self) -> float:
        return min((watcher.due_at for watcher in self._watchers.values()), default=math.inf)

    def snapshot(self, now: float) -> Callable[[], Snapshot]:
        """A function that makes the snapshot of the job at this moment: without the lock."""
        making = self._maker.snapshot(self._view(now))
        return lambda: at_once(making)

    def _view(self, now: float) -> JobView:
        return JobView.from_coordinator(self._job, self._reports, now, self._drained, self._changes)

    # Collections from nodes

    def _collect(self, session: int, command: CollectCommand, now: float) -> None:
        if sum(earlier.watcher == session for earlier in self._collections.values()) >= _MOST_COLLECTIONS:
            raise CommandRefused(f"{_MOST_COLLECTIONS} requests of this session are not answered yet; wait for these")
        job, number, kind = self._job, next(self._job.collections), command.kind
        nodes = [node for node in self._nodes_of(command) if node in job.sessions]
        nodes.sort(key=lambda node: node not in job.state.quiet)  # there may not be room for all
        is_logs = kind is CollectKind.LOGS
        follows = is_logs and command.cursor > 0 and job.state.verdict is None
        most = LIMITS[kind].of_node if follows else min(_MOST_OF_LOGS, room_for_each(kind, len(nodes)))
        requested = CollectRequested(number, kind, command.ranks, command.lines, command.cursor, most if is_logs else 0)
        ask = partial(job.send_to, notification=requested)
        collection = Collection(kind, nodes, job.sessions.__contains__, ask, now, follows=follows)
        self._collections[number] = _Collected(session, collection, command.ranks)
        self._followed_round = job.state.round if job.state.complete else -1
        self._end_collections()

    def _nodes_of(self, command: CollectCommand) -> Sequence[NodeId]:
        state = self._job.state
        if command.kind is CollectKind.LOGS and not state.complete:  # what the workers of the last round have written
            return [node for node in known_to(state) if not node.is_placeholder]
        return nodes_with_ranks(command.ranks, state)

    def _follow_nodes(self, now: float) -> None:
        """Whoever follows is sent what the nodes of a new round write too, until the job ends."""
        state = self._job.state
        if state.verdict is not None:
            for collection in self._collections.values():
                collection.nodes.finish(now)
            self._end_collections()
        elif state.complete and state.round != self._followed_round:
            self._followed_round = state.round
            for collection in self._collections.values():
                if collection.nodes.follows:
                    with suppress(CommandRefused):  # the new round has no such rank
                        collection.nodes.add(nodes_with_ranks(collection.ranks, state), now)

    def on_part(self, node: NodeId, part: CollectedPart, now: float) -> None:
        """A node has sent a part of a collection."""
        collection = self._collections.get(part.number)
        if collection is None or node not in collection.nodes:
            return
        data = collection.nodes.pass_on(node, part.data, part.is_last)
        self._job.send(collection.watcher, part._replace(data=data, node=name_of(self._job.state, node)))
        self._end_collections()

    def _end_collections(self) -> None:
        for number in [number for number, collection in self._collections.items() if collection.nodes.is_over]:
            watcher, nodes, _ = self._collections.pop(number)
            detail = "; ".join(self._left_out(nodes))
            self._job.send(watcher, CommandReply(done=not detail, detail=detail))

    def _left_out(self, collection: Collection) -> Iterator[str]:
        """What is not in a collection, in words."""
        limits = collection.limits
        kinds: tuple[tuple[str, Iterable[NodeId]], ...] = (
            (f"no answer within {limits.seconds:g} s from", collection.silent),
            ("lost meanwhile:", collection.lost),
            ("more than there is room for came from", collection.cut),
        )
        for what, nodes in kinds:
            if nodes:
                yield f"{what} {', '.join(self._names(nodes))}"
        if collection.not_asked:
            most = f"{limits.of_all // 2**20} MiB and {limits.longest:g} s are the most; ask for one by --rank"
            yield f"{collection.not_asked} nodes were not asked: {most}"

    def _names(self, nodes: Iterable[NodeId]) -> Sequence[str]:
        in_order = sorted(nodes)
        return names_of(self._job.state, in_order, _MOST_NAMED)

    # Inside

    def _ask_nodes(self, now: float) -> None:
        state = self._job.state
        fresh = max(_FRESH, len(state.participants) / _FRESH_NODES)
        if not state.complete or (self._asked_round == state.round and now - self._asked_at < fresh):
            return
        self._asked_at, self._asked_round = now, state.round
        self._awaited, self._to_ask = set(), iter(state.participants)
        self._ask_more(now)

    def _ask_more(self, now: float) -> None:
        job = self._job
        wave = list(islice(self._to_ask, _WAVE if self._asked_round == job.state.round else 0))
        there = [node for node in wave if node in job.sessions]
        self._awaited.update(there)
        job.send_to(there, ReportRequested())
        self._ask_at = now + _WAVES_APART if len(wave) == _WAVE else math.inf

    def _answer_some(self, now: float) -> None:
        """Make a slice of an answer, all of it if the job is small or has ended; send it once it is made."""
        sessions, making = self._making or self._begin_answer(now)
        self._making = None  # if it cannot be made, it is not tried again
        state = self._job.state
        try:
            next(making)
            while len(state.participants) <= SHOWN_NODES or state.verdict is not None:
                next(making)
            self._making = sessions, making
        except StopIteration as end:
            parts = snapshot_parts(end.value)
            for session, part in itertools.product(sessions, parts):
                self._job.send(session, part)
        except CommandRefused as error:
            for session in sessions:
                self._job.send(session, CommandReply(done=False, detail=str(error)))

    def _begin_answer(self, now: float) -> tuple[Sequence[int], Making]:
        """Begin to answer who has waited longest, with all who get the same snapshot."""
        due = {session: watcher for session, watcher in self._watchers.items() if watcher.due_at <= now}
        session, watcher = next(iter(due.items()))
        if watcher.request.has_rows:
            due = {session: watcher}
            view = watcher.view = watcher.view or self._view(now)
            making = self._rows(view, watcher.request)
        else:
            due = {session: watcher for session, watcher in due.items() if not watcher.request.has_rows}
            view, self._told_at = self._view(now), now
            making = self._maker.snapshot(view)
        for watcher in due.values():
            watcher.due_at, watcher.view = math.inf, None if watcher.follows else view
        return list(due), making

    def _rows(self, view: JobView, request: WatchRequest) -> Making:
        if request.node:
            return (yield from self._maker.row(view, find_node(request.node, view.state)))
        return (yield from self._maker.page(view, request.first))


# Commands. One that cannot be done changes nothing, and the refusal says why and what to do.


class CommandPlan(NamedTuple):
    """The effect of a command.

    `text` says what has happened, for people, as an event of this `kind`. `operation` is run on behalf of the operator,
    `request` is sent to one node.
    """

    text: str
    operation: Operation | None = None
    request: tuple[NodeId, DrainRequested | FaultRequested] | None = None
    kind: EventKind = EventKind.COMMAND

    @property
    def size(self) -> NodeRange | None:
        """The number of nodes that rounds have from now on, if it changes."""
        return self.operation.size if isinstance(self.operation, Resize) else None


class CommandRefused(Exception):
    """The command cannot be done; one sentence says why."""


def plan_command(command: Command, state: State, settings: Settings, sessions: SessionRegistry) -> CommandPlan:
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
            return CommandPlan(text, Close(detail=text))
        case DrainCommand():
            return _drain(command, state, sessions)
        case ResizeCommand():
            return _resize(command, state, settings, sessions)
        case FaultCommand():
            return _fault(command, state, settings, sessions)
    raise CommandRefused(f"a {type(command).__name__} is not a command that changes a job")


def _restart(state: State, by: str) -> CommandPlan:
    if not state.complete:
        raise CommandRefused("no round is running that could be restarted; the next one is forming")
    if state.succeeded:
        raise CommandRefused("some nodes have succeeded already; a restart would do their work again")
    return CommandPlan(f"{by} has restarted round {state.round}", Restart(state.round))


def _drain(command: DrainCommand, state: State, sessions: SessionRegistry) -> CommandPlan:
    node = find_node(command.node, state)
    name = _connected(node, state, sessions)
    if node in sessions.local_nodes:
        raise CommandRefused(
            f"{name} hosts the control plane of this job, which would end with it; "
            "to end the job use 'rallyctl stop', to host it elsewhere use 'rallyctl serve' or --rdzv-backend=etcd"
        )
    return CommandPlan(f"{command.by} drains {name}", request=(node, DrainRequested(command.by)))


def _connected(node: NodeId, state: State, sessions: SessionRegistry) -> str:
    """The name of a node, which has to be connected."""
    name = name_of(state, node)
    if node not in sessions:
        raise CommandRefused(f"{name} is not connected at the moment; try again when it is back")
    return name


_ENDS_CONTROL_PLANE = frozenset({Fault.KILL_AGENT, Fault.KILL_NODE, Fault.CUT})
_DEATH_LEASES = 2
"""Leases for which a node is silent that a drill kills: by then it was counted as lost, which is what is tried."""


def _fault(command: FaultCommand, state: State, settings: Settings, sessions: SessionRegistry) -> CommandPlan:
    fault, rank = command.fault, command.rank if command.fault.is_of_worker else -1
    if fault.is_of_worker and rank < 0:
        raise CommandRefused(f"the drill '{fault.value}' needs a rank")
    node = nodes_with_ranks((rank,), state)[0] if fault.is_of_worker else find_node(command.node, state)
    name = _connected(node, state, sessions)
    if fault in _ENDS_CONTROL_PLANE and node in sessions.local_nodes:
        raise CommandRefused(
            f"{name} hosts the control plane of this job, which is not there then to see what follows; "
            "drill another node, or host it elsewhere ('rallyctl serve')"
        )
    lasts = _DEATH_LEASES * settings.lease if fault is Fault.KILL_NODE else command.lasts
    what = f"{fault.value}: {f'rank {rank} on ' if fault.is_of_worker else ''}{name}"
    text = f"{command.by} drills {what}{f', for {lasts:g} s at most' if lasts else ''}"
    return CommandPlan(text, request=(node, FaultRequested(command.by, fault, rank, lasts)), kind=EventKind.DRILL)


def _resize(command: ResizeCommand, state: State, settings: Settings, sessions: SessionRegistry) -> CommandPlan:
    least, most = command.min_nodes, command.max_nodes
    if settings.fixed_ranks:
        raise CommandRefused("a static job has fixed ranks; start it with --rdzv-backend=c10d to resize it")
    if not 1 <= least <= most <= MAX_NODES:
        raise CommandRefused(
            f"{least}:{most} is not a range of nodes; give MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}"
        )
    if least % settings.segment:
        raise CommandRefused(f"rounds of this job have segments of {settings.segment} nodes; give a multiple as MIN")
    most -= most % settings.segment
    nodes = known_to(state)
    if not nodes or any(node not in sessions for node in nodes):
        raise CommandRefused("not all nodes of the job have come to this coordinator; try again when they have")
    if (least, most) == (settings.min_nodes, settings.max_nodes):
        raise CommandRefused(f"the job has {least}:{most} nodes already")
    short = max(0, least - len(nodes))
    if short and not command.force:
        stops = "its next failure would stop it" if state.complete else "its next round would wait"
        raise CommandRefused(
            f"the job has {_count(len(nodes))}, so that with {least} at least {stops} until {short} more "
            f"{'has' if short == 1 else 'have'} joined; start them first, or use --force"
        )
    was, now = f"{settings.min_nodes}:{settings.max_nodes}", f"{least}:{most}"
    then = ", from the next round on" if state.complete else ""
    needs = f", which needs {_count(short, 'more ')}" if short else ""
    return CommandPlan(
        f"{command.by} has resized the job from {was} to {now} nodes{then}{needs}", Resize(NodeRange(least, most))
    )


def _count(number: int, more: str = "") -> str:
    return f"{number} {more}node{'' if number == 1 else 's'}"


def find_node(name: str, state: State) -> NodeId:
    """The node with a name, host, address, pid@host or group rank.

    Raises:
        CommandRefused: there is none, or more than one.
    """
    nodes = [node for node in known_to(state) if not node.is_placeholder]
    rank = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 and state.complete else -1
    matches = [node for node in nodes if name and _has_name(name, rank, node, state)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        which = join_names([f"{node.pid}@{node}" for node in matches[:_MOST_NAMED]])
        raise CommandRefused(f"{name!r} names {len(matches)} nodes; name one of them: {which}")
    have = join_names(names_of(state, nodes, _MOST_NAMED)) or "none"
    raise CommandRefused(f"the job has no node {name!r}; it has {have}")


def nodes_with_ranks(ranks: Sequence[int], state: State) -> list[NodeId]:
    """The participants of the running round; if there are `ranks`, those whose workers have these.

    Raises:
        CommandRefused: no round runs, or it has no such rank.
    """
    if not state.complete:
        raise CommandRefused("no round is running, so there are no workers")
    in_order = sorted(state.participants.items(), key=lambda entry: entry[1].rank)
    if not ranks:
        return [node for node, _ in in_order]
    known = [participant for place, (_, participant) in enumerate(in_order) if place == participant.rank]
    ends = list(itertools.accumulate(participant.node_info.local_world_size for participant in known))
    nodes: dict[NodeId, None] = {}
    for rank in ranks:
        place = bisect_right(ends, rank)
        if place < len(ends):
            nodes[in_order[place][0]] = None
        elif len(ends) < len(in_order):
            raise CommandRefused(
                f"a node with lower ranks has succeeded and left, so it is not known which node has {rank}"
            )
        else:
            raise CommandRefused(f"the job has no rank {rank}; see 'rallyctl status'")
    return list(nodes)


def _has_name(name: str, rank: int, node: NodeId, state: State) -> bool:
    """Whether this names the node. Of many nodes it is asked for each, with the lock held: nothing is made for it."""
    if name in (node.host, node.addr):
        return True
    if rank >= 0 and (place := state.participants.get(node)) is not None and place.rank == rank:
        return True
    text = str(node)
    return (name.startswith(text) and name == name_of(state, node)) or (
        name.endswith(text) and name == f"{node.pid}@{text}"
    )
