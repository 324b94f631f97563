"""The sessions that watch a job and are not nodes: what they are sent, and what they command. Pure: `now` is passed in.

Laws:

1. Without watchers, the only cost is the record of events (`history`).
2. A follower is sent a snapshot after a change, at most every `_PAUSE` seconds (less often in a large job) and not
   before it has read the last one; without a change, nothing.
3. Nodes are asked for reports when a watcher asks for the state of the job, and not more often than they can answer at
   negligible cost; many are asked in waves. A node that does not answer in time is shown with what is known.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from rallypoint.control.coordinator.collection import LIMITS, Collection, room_for_each
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRegistry
from rallypoint.control.coordinator.snapshots import JobView, NodeReports, PendingSnapshot, SnapshotMaker, at_once
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
    WatcherNotification,
    WatcherRequest,
    WatchRequest,
)
from rallypoint.control.protocol.ranges import MAX_NODES

_PAUSE, _ROWS_A_SECOND = 0.2, 12_500
"""Seconds between messages to a follower; more if there are many nodes, which a snapshot has to count."""
_ANSWER = 0.25
"""Seconds that nodes have to report before a watcher is answered without them."""
_FRESH, _FRESH_NODES = 1.0, 256
"""Seconds for which a report is not requested again: a second for so many nodes, but one at least."""
_WAVE, _WAVES_APART = 1024, 0.2
"""The number of nodes that are asked for reports at once, and the seconds until the next ones are: the heartbeats of
all must not wait for the answers of all.
"""
_REFRESH, _NODES_A_SECOND = 2.0, 100
"""Seconds between requests for reports while there is a follower; more if there are many nodes, so that the reports of
thousands cost the coordinator no more than a few of their heartbeats.
"""
_STARTED = 0.5
"""Seconds after the start of a round until reports on its workers are requested, if there is a follower."""
_MOST_NAMED = 8
_MOST_COLLECTIONS = 4
"""Collections of one watcher at a time: each of them is looked at for each answer of a node."""
_MOST_OF_LOGS = 1024 * 1024
"""Bytes of one node's logs that are asked for at once, if there are few nodes."""


@dataclass(slots=True)
class _Watcher:
    follows: bool = False
    wants: bool = False
    """Whether it must be sent a snapshot at the next opportunity."""
    unread: bool = False
    """Whether it has not read the last one."""
    view: JobView | None = None
    """What the last one was made of: the other rows of a large job come from the same moment."""


class _Collected(NamedTuple):
    """A collection that a watcher has requested."""

    watcher: int
    nodes: Collection
    ranks: tuple[int, ...] = ()


class WatcherSessions:
    """All watchers of one job."""

    def __init__(self, job: Coordinator) -> None:
        self.sends: list[tuple[int, WatcherNotification | PendingSnapshot]] = []
        """Messages to watchers, by session; delivery removes them."""
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
        self._due_at = math.inf
        self._told_at = -math.inf
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

    def pop_sends(self) -> list[tuple[int, WatcherNotification | PendingSnapshot]]:
        """Take the messages for watchers, by session."""
        sends, self.sends = self.sends, []
        return sends

    @staticmethod
    def delivery_to(
        deliver: Callable[[WatcherNotification], None], make: Callable[[PendingSnapshot], None] | None = None
    ) -> Callable[[WatcherNotification | PendingSnapshot], None]:
        """What delivers to a watcher. A snapshot that is pending is given to `make`, or made first if there is none."""

        def deliver_message(message: WatcherNotification | PendingSnapshot) -> None:
            if isinstance(message, PendingSnapshot) and make is not None:
                make(message)
                return
            for part in message.parts() if isinstance(message, PendingSnapshot) else (message,):
                deliver(part)

        return deliver_message

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
        try:
            if isinstance(request, WatchRequest):
                self._watch(session, request, now)
                return
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
        """The state has changed: followers must be sent a snapshot."""
        if self._collections:
            self._follow_nodes(now)
        for watcher in self._watchers.values():
            if watcher.follows:
                watcher.wants = True
                if not watcher.unread:
                    self._due_at = min(self._due_at, max(now, self._told_at + self._pause()))
        if self._job.state.verdict is not None:  # at once: the coordinator may end with its job
            self._send_snapshots(now)

    def _pause(self) -> float:
        state = self._job.state
        return max(_PAUSE, (len(state.participants) + len(state.survivors)) / _ROWS_A_SECOND)

    def _watch(self, session: int, request: WatchRequest, now: float) -> None:
        watcher = self._watchers[session]
        if request.first >= 0 or request.node:
            view = watcher.view = watcher.view or self._view(now)
            if request.node:
                making = self._maker.row(view, find_node(request.node, view.state))
            else:
                making = self._maker.page(view, request.first)
            self.sends.append((session, PendingSnapshot(making)))
            return
        watcher.follows, watcher.wants, watcher.unread = request.follow, True, False
        self._ask_nodes(now)
        self._due_at = min(self._due_at, now + _ANSWER if self._awaited else now)

    def _on_read(self, session: int, number: int, now: float) -> None:
        """A watcher has read what it was sent."""
        watcher = self._watchers[session]
        if number == 0:
            watcher.unread = False
            if watcher.wants:
                self._due_at = min(self._due_at, max(now, self._told_at + self._pause()))
        elif (collection := self._collections.get(number)) is not None and collection.watcher == session:
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
        all_known = not self._awaited and self._ask_at == math.inf
        if all_known and any(watcher.wants and not watcher.follows for watcher in self._watchers.values()):
            self._due_at = min(self._due_at, now)

    def forget(self, node: NodeId, now: float) -> None:
        """A node is gone: its answers are no longer awaited."""
        self._reports.forget(node)
        self._awaited.discard(node)
        self._drained.pop(node, None)
        for collection in self._collections.values():
            collection.nodes.forget(node, now)
        self._end_collections()

    def tick(self, now: float) -> None:
        """Queue due messages, and ask nodes if there is a follower."""
        for collection in self._collections.values():
            if collection.nodes.wake_at() <= now:
                collection.nodes.tick(now)
        self._end_collections()
        if now >= self._due_at:
            self._due_at = math.inf
            self._send_snapshots(now)
        if now >= self._ask_at:
            self._ask_more(now)
        if now >= self._refresh_at():
            self._ask_nodes(now)

    def wake_at(self) -> float:
        """The time at which `tick` has something to do."""
        until = min((collection.nodes.wake_at() for collection in self._collections.values()), default=math.inf)
        return min(self._due_at, self._ask_at, self._refresh_at(), until)

    def snapshot(self, now: float) -> Callable[[], Snapshot]:
        """A function that makes the snapshot of the job at this moment: without the lock."""
        making = self._maker.snapshot(self._view(now))
        return lambda: at_once(making)

    def _view(self, now: float) -> JobView:
        return JobView.from_coordinator(self._job, self._reports, now, self._drained)

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
        self.sends.append((collection.watcher, part._replace(data=data, node=name_of(self._job.state, node))))
        self._end_collections()

    def _end_collections(self) -> None:
        for number in [number for number, collection in self._collections.items() if collection.nodes.is_over]:
            watcher, nodes, _ = self._collections.pop(number)
            detail = "; ".join(self._left_out(nodes))
            self.sends.append((watcher, CommandReply(done=not detail, detail=detail)))

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

    def _refresh_at(self) -> float:
        """When nodes must be asked again; infinity while there is no follower, or no round runs."""
        state = self._job.state
        if not state.complete or state.closed or not any(watcher.follows for watcher in self._watchers.values()):
            return math.inf
        if self._asked_round != state.round and self._job.history.phase_since is not None:
            return self._job.history.phase_since + _STARTED
        return self._asked_at + max(_REFRESH, len(state.participants) / _NODES_A_SECOND)

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

    def _send_snapshots(self, now: float) -> None:
        over = self._job.state.verdict is not None
        wanting = [entry for entry in self._watchers.items() if entry[1].wants and (over or not entry[1].unread)]
        if not wanting:
            return
        self._told_at = now
        view = self._view(now)
        pending = PendingSnapshot(self._maker.snapshot(view))
        for session, watcher in wanting:
            watcher.wants, watcher.unread = False, watcher.follows
            watcher.view = None if watcher.follows else view
            self.sends.append((session, pending))


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
