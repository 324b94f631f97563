"""The state of one job at its coordinator: operations, waiting joins, and the consequences of each change.

Pure: `now` is passed in, and messages to send are collected.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.light_typing import TYPE_CHECKING, ParamSpec
from rallypoint.coordinator.apply_loop import OperationResult, join_refusal, run_operation
from rallypoint.coordinator.history import JobHistory
from rallypoint.coordinator.notifications import Placements, end_notification, nodes_waiting, notification_diff
from rallypoint.coordinator.recovery import recovery_timeout
from rallypoint.coordinator.session_registry import SessionRecord, SessionRegistry
from rallypoint.membership.decisions import ClockView, backoff_ends, last_call_decides, needs_all
from rallypoint.membership.liveness import Liveness
from rallypoint.membership.observer import StallObserver
from rallypoint.membership.operations import Exit, Join, Operation
from rallypoint.membership.state import NodeId, NodeInfo, Reason, Settings, State, name_of, nodes_waiting_alike
from rallypoint.membership.transitions import without_nodes
from rallypoint.protocol.messages import ConfigDiffers, NodesWaiting, Notification, Placed, Placement

if TYPE_CHECKING:
    from rallypoint.coordinator.hangs import HangCollection

P = ParamSpec("P")
OutgoingNotification = tuple[int, Notification]

_MAX_DIFFERENCES = 32
"""The number of differences that one session is told."""


class PendingJoins:
    """The waiting joins, by node, and when their time is over."""

    def __init__(self) -> None:
        self._joins: dict[NodeId, Join] = {}
        self._deadlines: list[tuple[float, NodeId]] = []
        """A heap. An entry whose join no longer waits, or waits for longer, is ignored."""

    def add(self, node: NodeId, join: Join) -> None:
        """A node waits with this join, which replaces any earlier one."""
        self._joins[node] = join
        if join.deadline < math.inf:
            heapq.heappush(self._deadlines, (join.deadline, node))

    def get(self, node: NodeId) -> Join | None:
        """The join of a waiting node."""
        return self._joins.get(node)

    def remove(self, node: NodeId) -> None:
        """The node no longer waits. Idempotent."""
        self._joins.pop(node, None)

    def clear(self) -> None:
        """Remove all."""
        self._joins.clear()

    def __iter__(self) -> Iterator[NodeId]:
        """The nodes that wait at this moment."""
        return iter(list(self._joins))

    def next_deadline(self) -> float:
        """The earliest of the deadlines; infinity if there is none."""
        while self._deadlines and not self._is_current(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def pop_due(self, now: float) -> NodeId | None:
        """A node whose time is over and that was not returned for this before; None for none."""
        return heapq.heappop(self._deadlines)[1] if self.next_deadline() <= now else None

    def _is_current(self, deadline: float, node: NodeId) -> bool:
        join = self._joins.get(node)
        return join is not None and join.deadline == deadline


class JobState:
    """The state, the sessions of its nodes, and the waiting joins."""

    def __init__(self, settings: Settings, incarnation: str) -> None:
        self.settings = settings
        self._started_with = settings
        """The settings without later changes by an operator."""
        self.incarnation = incarnation
        self.state = State()
        self.sessions = SessionRegistry(Liveness(settings.lease, recovery_timeout(settings)))
        self._observer = StallObserver(settings)
        self._pending = PendingJoins()
        self._sends: list[OutgoingNotification] = []
        self.history = JobHistory()
        self.on_change: Callable[[float], None] | None = None
        """Called with the time after each change, if there are watchers."""
        self.hangs: HangCollection | None = None
        """Set once the job has hung."""
        self.collections = count(1)
        """The numbers of requested collections."""
        self._hosts: set[str] = set()
        """The addresses, as we see them, of the nodes of the round that runs or last ran."""
        self._hosts_round = -1
        self._placements = Placements()
        self._completed_a_round = False
        """Whether a round was completed here, and not only taken over from an earlier coordinator."""
        self._placeholders_until: float | None = None
        """The time until which known nodes without a session are awaited."""

    # Running operations

    def _retry_join(self, node: NodeId, now: float) -> None:
        """Continue a waiting join as far as possible now."""
        join = self._pending.get(node)
        if join is None:
            return
        before = self.state
        ran = self._run(node, join, now)
        if ran.final_action is not None:
            self._pending.remove(node)
            refused = join_refusal(ran, node, before, self.state, self.settings, self._observer.clock_view(now))
            if refused is not None:
                self.send_to([node], refused)
        elif isinstance(ran.operation, Join) and ran.operation is not join:
            self._pending.add(node, ran.operation)

    def _run(self, node: NodeId, operation: Operation, now: float) -> OperationResult:
        return run_operation(
            operation,
            node,
            self.settings,
            lambda: self.state,
            lambda: self._observer.clock_view(now),
            lambda state: self._write(state, now),
        )

    def _write(self, state: State, now: float) -> None:
        self.state = state
        self._observer.observe(state, now)
        self._take_size(state)

    def _lose(self, nodes: Iterable[NodeId], now: float, reason: Reason, detail: str = "") -> None:
        """Remove these nodes: all in one change, or a round might be completed with one that is removed next."""

        waiting: list[NodeId] = []

        def remove_waiting() -> None:
            if waiting:
                self._write(without_nodes(self.state, waiting, reason, self.settings), now)
                waiting.clear()

        def remove_all() -> None:
            for node in nodes:
                state = self.state
                ends_round = node in state.participants and (not state.is_preempted or node in state.succeeded)
                if state.complete and ends_round:
                    remove_waiting()
                    self._run(node, Exit(reason, detail), now)
                elif state.knows(node):
                    waiting.append(node)
            remove_waiting()

        self._change(now, remove_all)

    # From one state to the next.

    def _change(self, now: float, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Take a step, notify the nodes concerned, and check all joins again while it could matter to them."""
        before = self.state
        step(*args, **kwargs)
        while before is not self.state:
            after = self.state
            self._notify(before, after)
            self.history.record(before, after, now)
            if after.quiet:
                self._look_for_hang(before, after, now)
            if self.on_change is not None:
                self.on_change(now)
            if not _may_unblock_joins(before, after, self.settings):
                return
            before = after
            self._retry_all_joins(now)

    def _retry_all_joins(self, now: float) -> None:
        for node in self._pending:
            self._retry_join(node, now)

    def _notify(self, before: State, after: State) -> None:
        if after.verdict is not None and before.verdict is None:
            self._pending.clear()
            made: dict[Notification, Notification] = {}  # equal ones are one object, which is encoded once
            for session, each in self.sessions:
                ended = end_notification(after, each.node, after.verdict)
                self._sends.append((session, made.setdefault(ended, ended)))
            return
        for nodes, notification in notification_diff(before, after):
            # A node that leaves by this very change need not be notified of it.
            concerned = [each for each in nodes if after.knows(each) or each not in before.participants]
            if isinstance(notification, Placed):
                for node in concerned:
                    self._place(node, notification)
            elif not (isinstance(notification, NodesWaiting) and self._placeholders_until is not None):
                self.send_to(concerned, notification)

    def _look_for_hang(self, before: State, after: State, now: float) -> None:
        if self.hangs is None:
            from rallypoint.coordinator.hangs import HangCollection

            self.hangs = HangCollection(self.send_to, self.collections, lambda node: name_of(self.state, node))
        if self.hangs.look(before, after, self.sessions.__contains__, now):
            self.history.add("hang found", after.round, "no rank has given a sign of life for long", now)

    def send_to(self, nodes: Iterable[NodeId], notification: Notification) -> None:
        """Send to a node if it has a session; otherwise it asks when it is back."""
        sessions = (self.sessions.session_of(node) for node in nodes)
        self._sends += [(session, notification) for session in sessions if session is not None]

    def _place(self, node: NodeId, placed: Placed) -> None:
        self._completed_a_round = True
        self._pending.remove(node)
        if node in self.sessions:
            self._note_host(node)
            self._drop_repeated_join(node)
            self._send_placed(node, placed.placement)

    def _send_placed(self, node: NodeId, placement: Placement) -> None:
        """Send a placement, with data from sessions; to the host of the round's store, after its allowed peers."""
        if placement.group_rank == 0:
            self._notify_peers(node)
        if is_loopback(placement.store_address):
            # A host in our own process may know only such an address of itself: then use the one that remote nodes use
            # for us.
            host = self.sessions.own_external_address or placement.store_address
            placement = placement._replace(store_address=host)
        places = self.state.participants
        control_rank = next((places[each].rank for each in self.sessions.local_nodes if each in places), -1)
        origin = self.state.origin or self.incarnation
        self.send_to([node], Placed(placement._replace(origin=origin, control_rank=control_rank)))

    def _notify_peers(self, host: NodeId) -> None:
        """Tell the host of the round's store the addresses of workers, if the nodes have reported them."""
        if any(each.addresses is not None for _, each in self.sessions):
            from rallypoint.coordinator.store_peers import peers_notification

            for notification in peers_notification(self.state, self.sessions):
                self.send_to([host], notification)

    def _drop_repeated_join(self, node: NodeId) -> None:
        """Ignore a repeated join: the node has its place by the earlier one, and requests no other."""
        session = self.sessions.session_of(node)
        speaker = None if session is None else self.sessions.get(session)
        if speaker is not None and speaker.repeats_join:
            speaker.skips_join, speaker.repeats_join = True, False

    # Nodes that have proved nothing (`coordinator.peer_access`)

    def _note_host(self, node: NodeId) -> None:
        """A node of the running round is at the other end of its session."""
        number = self.sessions.session_of(node)
        session = None if number is None else self.sessions.get(number)
        if self._hosts_round != self.state.round:
            self._hosts_round, self._hosts = self.state.round, set()
        if session is not None:
            self._hosts.add(session.observed_address)

    def is_stranger(self, speaker: SessionRecord) -> bool:
        """Whether nothing shows that a node belongs to the job: it has proved nothing, and its machine hosts no node of
        the round that runs or last ran. Before the first round that is shown by a place.
        """
        if speaker.trusted:
            return False
        return speaker.observed_address not in self._hosts if self._hosts else not self.state.knows(speaker.node)

    # Notifications for one node

    def _reply(self, speaker: SessionRecord, notification: Notification) -> None:
        self._sends.append((speaker.number, notification))

    def _report_differences(self, speaker: SessionRecord, node_info: NodeInfo) -> None:
        """Notify a node once if it was started with other settings than the job."""
        own, job, state = speaker.settings, self._started_with, self.state
        if state.is_initial:
            state = State()
        if len(speaker.differences_reported) >= _MAX_DIFFERENCES:
            return
        alike = state.max_restarts in (-1, node_info.max_restarts)
        if alike and own in (None, job) and state.programs.get(node_info.role, node_info.program) == node_info.program:
            return
        from rallypoint.coordinator.differences import differences

        found = tuple(
            each for each in differences(node_info, own, state, job) if each not in speaker.differences_reported
        )
        if found:
            speaker.differences_reported += found
            self._reply(speaker, ConfigDiffers(name_of(state, speaker.node), found))

    # Known nodes that have not reported yet

    def _unreported(self) -> Iterator[NodeId]:
        """Participants that have not reported yet."""
        state = self.state
        known = chain(state.participants, state.wait_list, state.redundancy_list, state.survivors)
        return (node for node in known if node not in self.sessions)

    def _any_unreported(self) -> bool:
        return next(self._unreported(), None) is not None

    def _check_all_reported(self) -> None:
        if self._placeholders_until is not None and not self._any_unreported():
            self._all_reported()

    def _all_reported(self) -> None:
        """Stop awaiting nodes that were in the job when this coordinator was filled."""
        self._placeholders_until = None
        state = self.state
        if state.complete and state.wait_list:
            self.send_to(state.participants, nodes_waiting(state))

    # Effects of time

    def _waits_for_time(self) -> bool:
        """Whether the forming round may become complete by the passing of time alone."""
        state = self.state
        if state.complete or not state.participants or state.closed:
            return False
        return bool(state.restart_delay) or (bool(state.last_call) and last_call_decides(state))

    def _completion_times(self) -> list[float]:
        """The moments at which it may, on our clock: the ends of the last call and of the restart delay."""
        view = self._observer.clock_view(0.0)
        moments = [backoff_ends(self.state, view)] if self.state.restart_delay else []
        if view.last_call_at is not None and last_call_decides(self.state):
            moments.append(view.last_call_at + self.settings.last_call_timeout)
        return moments

    def _ends_at(self, node: NodeId) -> float:
        """When the wait of a node is over: its own deadline, or, if all nodes are needed, the first of all."""
        own = self._pending.get(node)
        if own is None or node in self.state.redundancy_list:
            return math.inf
        if not needs_all(self.state, self.settings):
            return own.deadline
        return min(own.deadline, self._pending.next_deadline())

    def _reports_progress(self, node: NodeId) -> bool:
        """Whether a node logs the progress: among nodes that wait alike, the one in this process, or the first."""
        alike = nodes_waiting_alike(self.state, node)
        return node == next((each for each in self.sessions.nodes_in_this_process if each in alike), next(iter(alike)))

    def clock_view(self, now: float) -> ClockView:
        """The clock view at `now`."""
        return self._observer.clock_view(now)

    def operate(self, operation: Operation, by: str, now: float) -> None:
        """Run an operation on behalf of the operator with this name."""
        self._change(now, self._run, NodeId("", 0, 0, by), operation, now)

    def _take_size(self, state: State) -> None:
        """Apply a change of the number of nodes by an operator."""
        if state.size is not None:
            self.settings = self.settings._replace(**state.size._asdict())

    def _pop_sends(self) -> list[OutgoingNotification]:
        sends, self._sends = self._sends, []
        return sends


def _may_unblock_joins(before: State, after: State, settings: Settings) -> bool:
    """Whether a waiting join could continue now.

    Another node's arrival in a forming round does not matter to waiting nodes, except that it may start the last call
    or be the one that was awaited. This keeps a rendezvous of n nodes at n checks instead of n squared.
    """
    if (before.round, before.complete, before.closed) != (after.round, after.complete, after.closed):
        return True
    if (before.abandoned.number, before.size) != (after.abandoned.number, after.size):
        return True
    places_before = len(before.participants) + len(before.wait_list) + len(before.survivors)
    places_after = len(after.participants) + len(after.wait_list) + len(after.survivors)
    if places_after < places_before and places_after < settings.max_nodes:
        return True
    reforms = after.round > 0 and not after.complete
    return reforms and not after.survivors and not after.wait_list and len(after.participants) >= settings.min_nodes
