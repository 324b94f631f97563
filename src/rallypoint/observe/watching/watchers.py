"""The watchers' sessions with a job: answers and commands. Pure: the caller passes `now`.

Laws:

1. Without watchers, the only cost is the record of events (`history`).
2. A watcher has at most one unanswered request for a snapshot; the next one replaces it. So many requests cost no more
   than one.
3. All waiting watchers get the same snapshot. For a large job, it is created in slices, one per tick, between which
   nodes are served.
4. A follower is told without a request that the job ended: an embedded coordinator may be gone before the next request
   arrives.
5. Nodes are asked for reports when a watcher requests the job's state, but only as often as they can answer at
   negligible cost. Many nodes are asked in waves. A node that does not answer in time is shown with the known data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.extension import Extension
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import (
    NodeId,
    State,
    known_to,
    name_of,
    names_of,
)
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectKind,
    CollectRequested,
    DrainRequested,
    NodeReport,
    OperatorAction,
    ReportRequested,
    Taken,
)
from rallypoint.observe.watching.collection import LIMITS, Collection, room_for_each
from rallypoint.observe.watching.commands import MOST_NAMED, CommandRefused, find_node, nodes_with_ranks, plan_command
from rallypoint.observe.watching.messages import (
    SHOWN_NODES,
    CollectCommand,
    Command,
    CommandReply,
    Snapshot,
    WatcherRequest,
    WatchRequest,
    snapshot_parts,
)
from rallypoint.observe.watching.snapshots import (
    JobView,
    Making,
    NodeReports,
    SnapshotMaker,
    at_once,
    reported_round,
)

_PAUSE, _LONGEST_PAUSE, _ROWS_A_SECOND = 0.2, 2.0, 12_500
"""Seconds between answers to followers; more with many nodes, since a snapshot must count them."""
_UNCHANGED = 1.0
"""Seconds after which followers get an answer without a change, if the pause is shorter."""
_ANSWER = 0.25
"""Seconds that nodes have to report before a watcher is answered without them."""
_FRESH, _FRESH_NODES = 1.0, 256
"""Request a report again after one second per this many nodes, but at least one second."""
_WAVE, _WAVES_APART = 1024, 0.2
"""The number of nodes to ask for reports at once, and seconds until the next ones: heartbeats must not wait for
everybody's answers.
"""
_MOST_COLLECTIONS = 4
"""Maximum number of collections per watcher: each answer of a node is matched against all."""
_MOST_OF_LOGS = 1024 * 1024
"""Bytes to request of one node's logs at once, if there are few nodes."""


@dataclass(slots=True)
class _Watcher:
    request: WatchRequest = field(default_factory=WatchRequest)
    """The watcher's last request."""
    due_at: float = math.inf
    """When the answer is due; infinity without an open request."""
    view: JobView | None = None
    """The view for the last answer: more rows of a large job come from the same moment."""

    @property
    def follows(self) -> bool:
        """Whether the watcher asks again after reading the answer."""
        return self.request.after >= 0


class _CollectRequest(NamedTuple):
    """A watcher's collection."""

    watcher: int
    collection: Collection
    ranks: tuple[int, ...] = ()


class WatcherSessions(Extension):
    """All watchers of one job."""

    def __init__(self, job: Coordinator) -> None:
        self.job = job
        self.handlers = {NodeReport: self._on_report, CollectedPart: self._on_part}
        self._reports = NodeReports()
        self._maker = SnapshotMaker()
        self._watchers: dict[int, _Watcher] = {}
        self._awaited: set[NodeId] = set()
        """Nodes that have not answered a request for a report."""
        self._asked_at, self._asked_round = -math.inf, -1
        """When nodes were last asked, and in which round: answers about another round are useless."""
        self._to_ask: Iterator[NodeId] = iter(())
        """The nodes in that round to ask next, at `_ask_at`."""
        self._ask_at = math.inf
        self._making: tuple[Sequence[int], Making] | None = None
        """The sessions to answer, and their unfinished snapshot."""
        self._changes = 1
        """The number of the last change: `Snapshot.changes`."""
        self._told_at = -math.inf
        """When the last snapshot without specific rows was started."""
        self._collections: dict[int, _CollectRequest] = {}
        self._drained: dict[NodeId, str] = {}
        """Nodes that were asked to leave, and by whom."""
        self._followed_round = -1
        """The round whose nodes' logs are followed."""

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def is_awaited(self) -> bool:
        """Whether a watcher is waiting for nodes: those that end with the job answer first."""
        return bool(self._collections)

    def open(self, session: int) -> None:
        self._watchers[session] = _Watcher()

    def remove_quietest(self) -> int:
        """Remove the watcher that has been silent longest. Returns its session."""
        session = next(iter(self._watchers))
        self.close(session)
        return session

    def close(self, session: int) -> None:
        for number in [number for number, request in self._collections.items() if request.watcher == session]:
            del self._collections[number]
        self._watchers.pop(session, None)

    def receive(self, session: int, request: WatcherRequest, now: float, refusal: str) -> None:
        """Handle a watcher's message; `refusal` is why it may not send commands, empty if it may."""
        if (watcher := self._watchers.pop(session, None)) is None:
            return  # replaced
        self._watchers[session] = watcher  # the last one to speak is at the end
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
                self.job.send(session, CommandReply(done=True, detail=self._carry_out(request, now)))
        except CommandRefused as error:
            self.job.send(session, CommandReply(done=False, detail=str(error)))

    def _carry_out(self, command: Command, now: float) -> str:
        """Carry out a command. Returns a description of the effect."""
        job = self.job
        plan = plan_command(command, job.state, job.settings, job.sessions)
        job.history.add(plan.kind.value, job.state.round, plan.text, now)
        job.send_to([session.node for session in job.sessions], OperatorAction(command.by, plan.text, plan.size))
        if plan.request is not None:
            node, request = plan.request
            if isinstance(request, DrainRequested):
                self._drained[node] = command.by
            job.send_to([node], request)
        self._on_change(now)
        if plan.operation is not None:
            job.operate(NodeId("", 0, 0, command.by), plan.operation, now)
        return plan.text

    def on_change(self, _before: State, _after: State, now: float) -> None:
        """Answer the followers after a change of the state."""
        self._on_change(now)

    def _on_change(self, now: float) -> None:
        self._changes += 1
        if self._collections:
            self._follow_nodes(now)
        is_over = self.job.state.verdict is not None
        for watcher in self._watchers.values():
            if watcher.follows and is_over:
                watcher.request, watcher.due_at = WatchRequest(), now
            elif watcher.follows and watcher.due_at < math.inf:
                watcher.due_at = min(watcher.due_at, max(now, self._told_at + self._pause()))

    def _pause(self) -> float:
        state = self.job.state
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
        """Record that a watcher has read a node's answer to a collection."""
        if (request := self._collections.get(number)) is not None and request.watcher == session:
            request.collection.on_read(now)
            self._end_collections()

    def _on_report(self, speaker: SessionRecord, report: NodeReport, now: float) -> None:
        """Store a node's report. Ignore reports that were not requested."""
        node = speaker.node
        if node not in self._awaited:
            return
        before = self._reports.add(node, report, now)
        self.job.history.reported(report.age, report.command, report.log_folder, now)
        self._awaited.discard(node)
        if (
            before is None
            or before[:2] != report[:2]
            or len(before.ended) != len(report.ended)
            or before.steps != report.steps
            or before.progress != report.progress
        ):
            self._on_change(now)
        if not self._awaited and self._ask_at == math.inf:
            for watcher in self._watchers.values():
                if watcher.due_at < math.inf and not watcher.follows:
                    watcher.due_at = now

    def on_resume(self, _node: NodeId, now: float) -> None:
        """Let following collections ask a node again that returned."""
        for request in self._collections.values():
            request.collection.on_resume(now)

    def forget(self, node: NodeId, now: float) -> None:
        self._reports.forget(node)
        self._awaited.discard(node)
        self._drained.pop(node, None)
        for request in self._collections.values():
            request.collection.forget(node, now)
        self._end_collections()

    def tick(self, now: float) -> None:
        """Queue due messages, and ask more nodes for reports."""
        for request in self._collections.values():
            if request.collection.wake_at() <= now:
                request.collection.tick(now)
        self._end_collections()
        if now >= self._ask_at:
            self._ask_more(now)
        while self._making is not None or now >= self._due_at():
            self._answer_some(now)
            if self.job.state.verdict is None:  # otherwise finish it: the coordinator may end with its job
                break

    def wake_at(self) -> float:
        until = min((request.collection.wake_at() for request in self._collections.values()), default=math.inf)
        return min(self._due_at() if self._making is None else -math.inf, self._ask_at, until)

    def _due_at(self) -> float:
        return min((watcher.due_at for watcher in self._watchers.values()), default=math.inf)

    def snapshot(self, now: float) -> Callable[[], Snapshot]:
        """Copy what can change. Returns a function, for any thread, that creates this moment's snapshot."""
        making = self._maker.snapshot(self._view(now))
        return lambda: at_once(making)

    def _view(self, now: float) -> JobView:
        return JobView.from_coordinator(self.job, self._reports, now, self._drained, self._changes)

    # Collecting from nodes

    def _collect(self, session: int, command: CollectCommand, now: float) -> None:
        if sum(earlier.watcher == session for earlier in self._collections.values()) >= _MOST_COLLECTIONS:
            raise CommandRefused(
                f"{_MOST_COLLECTIONS} requests of this session have not been answered yet; wait for the answers"
            )
        job, number, kind = self.job, next(self.job.extensions.numbers), command.kind
        nodes = [node for node in self._nodes_of(command) if node in job.sessions]
        nodes.sort(key=lambda node: node not in job.state.quiet)  # quiet nodes first: not all might fit
        is_logs = kind is CollectKind.LOGS
        follows = is_logs and command.cursor > 0 and job.state.verdict is None
        most = LIMITS[kind].of_node if follows else min(_MOST_OF_LOGS, room_for_each(kind, len(nodes)))
        requested = CollectRequested(number, kind, command.ranks, command.lines, command.cursor, most if is_logs else 0)
        ask = partial(job.send_to, notification=requested)
        collection = Collection(kind, nodes, job.sessions.__contains__, ask, now, follows=follows)
        self._collections[number] = _CollectRequest(session, collection, command.ranks)
        self._followed_round = job.state.round if job.state.complete else -1
        self._end_collections()

    def _nodes_of(self, command: CollectCommand) -> Sequence[NodeId]:
        state = self.job.state
        if command.kind is CollectKind.LOGS and not state.complete:  # the output of the last round's workers
            return [node for node in known_to(state) if not node.is_placeholder]
        return nodes_with_ranks(command.ranks, state)

    def _follow_nodes(self, now: float) -> None:
        """Let followers also get the output of a new round's nodes, until the job ends."""
        state = self.job.state
        if state.verdict is not None:
            for request in self._collections.values():
                request.collection.finish(now)
            self._end_collections()
        elif state.complete and state.round != self._followed_round:
            self._followed_round = state.round
            for request in self._collections.values():
                if request.collection.follows:
                    with suppress(CommandRefused):  # the new round lacks this rank
                        request.collection.add(nodes_with_ranks(request.ranks, state), now)

    def _on_part(self, speaker: SessionRecord, part: CollectedPart, now: float) -> None:
        """Pass on a part of a collection that a node sent."""
        node, request = speaker.node, self._collections.get(part.number)
        if request is None or node not in request.collection:
            return
        data = request.collection.pass_on(node, part.data, part.is_last)
        self.job.send(request.watcher, part._replace(data=data, node=name_of(self.job.state, node)))
        self._end_collections()

    def _end_collections(self) -> None:
        for number in [number for number, request in self._collections.items() if request.collection.is_over]:
            request = self._collections.pop(number)
            detail = "; ".join(self._left_out(request.collection))
            self.job.send(request.watcher, CommandReply(done=not detail, detail=detail))

    def _left_out(self, collection: Collection) -> Iterator[str]:
        """Sentences about the parts that a collection lacks."""
        limits = collection.limits
        kinds: tuple[tuple[str, Iterable[NodeId]], ...] = (
            (f"no answer within {limits.seconds:g} s from", collection.silent),
            ("lost in the meantime:", collection.lost),
            ("too much data came from", collection.cut),
        )
        for what, nodes in kinds:
            if nodes:
                yield f"{what} {', '.join(self._names(nodes))}"
        if collection.not_asked:
            most = f"{limits.of_all // 2**20} MiB and {limits.longest:g} s are the limits; choose one node with --rank"
            yield f"{collection.not_asked} nodes were not asked: {most}"

    def _names(self, nodes: Iterable[NodeId]) -> Sequence[str]:
        in_order = sorted(nodes)
        return names_of(self.job.state, in_order, MOST_NAMED)

    # Internals

    def _ask_nodes(self, now: float) -> None:
        state, round_ = self.job.state, reported_round(self.job.state)
        fresh = max(_FRESH, len(state.participants) / _FRESH_NODES)
        if round_ < 0 or (self._asked_round == round_ and now - self._asked_at < fresh):
            return
        self._asked_at, self._asked_round = now, round_
        self._awaited, self._to_ask = set(), iter(state.participants)
        self._ask_more(now)

    def _ask_more(self, now: float) -> None:
        job = self.job
        wave = list(islice(self._to_ask, _WAVE if self._asked_round == reported_round(job.state) else 0))
        there = [node for node in wave if node in job.sessions]
        self._awaited.update(there)
        job.send_to(there, ReportRequested())
        self._ask_at = now + _WAVES_APART if len(wave) == _WAVE else math.inf

    def _answer_some(self, now: float) -> None:
        """Create one slice of an answer, or all of it if the job is small or has ended; send a complete answer."""
        sessions, making = self._making or self._begin_answer(now)
        self._making = None  # do not try again if this fails
        state = self.job.state
        try:
            next(making)
            while len(state.participants) <= SHOWN_NODES or state.verdict is not None:
                next(making)
            self._making = sessions, making
        except StopIteration as end:
            parts = snapshot_parts(end.value)
            for session, part in itertools.product(sessions, parts):
                self.job.send(session, part)
        except CommandRefused as error:
            for session in sessions:
                self.job.send(session, CommandReply(done=False, detail=str(error)))

    def _begin_answer(self, now: float) -> tuple[Sequence[int], Making]:
        """Start to answer the watcher that has waited longest, and all that get the same snapshot."""
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
