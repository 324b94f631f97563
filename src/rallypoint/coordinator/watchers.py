"""The sessions that watch a job and are not nodes: what they are sent, and when. Pure: `now` is passed in.

Laws:

1. Without watchers, the only cost is the record of events (`history`).
2. A follower is sent a snapshot after a change, at most every `_PAUSE` seconds; without a change, nothing.
3. Nodes are asked for reports when a watcher asks for the state of the job, and not more often than they can answer at
   negligible cost. A node that does not answer in time is shown with what is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.coordinator.commands import CommandRefused, nodes_with_rank, plan_command
from rallypoint.coordinator.coordinator import Coordinator
from rallypoint.coordinator.snapshot import snapshot_of
from rallypoint.membership.state import NodeId, name_of, names_of
from rallypoint.protocol.observation import (
    CollectCommand,
    Command,
    CommandReply,
    Snapshot,
    WatcherNotification,
    WatcherRequest,
    WatchRequest,
    snapshot_parts,
)
from rallypoint.protocol.operator_messages import (
    CollectedPart,
    CollectRequested,
    DrainRequested,
    NodeAnswer,
    NodeReport,
    OperatorAction,
    ReportRequested,
)

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
        job.send_to([each.node for _, each in job.sessions], OperatorAction(command.by, plan.text, plan.size))
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
        job = self._job
        view = job.clock_view(now)
        return snapshot_of(job.state, job.settings, job.incarnation, job.sessions, self._reports, job.history, view)

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
