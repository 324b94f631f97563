"""The coordinator: the executor that decides for all nodes in one place.

It runs the pure core over one state. A node sends its operation once over its session and is told when it is done; all
joins that wait are looked at again when the state changes in a way that could matter to them. Nobody polls.

This module is itself without I/O: sessions are numbers, `now` is handed in, and what is to be sent comes back as a
list. The shell around it (`dispatcher`) delivers.

Laws:

1. A session speaks for one node. Its end is the node's end, at once.
2. A session that is silent for the lease has ended (`liveness`).
3. Every notification follows from comparing the state before and after; nothing is sent twice for one change.
4. A session that names itself by an earlier one of ours takes that one's place, with all that its node holds. So no
   name is given twice.
5. Where it is we who are cut off, the sessions are released after a while. A round that runs then runs on: who comes
   back has its place still, and the others are waited for like those who are yet to speak to a new coordinator.
6. Who succeeds a coordinator with all that it knew (`restore`) goes by its name: to the nodes it is the same one, which
   had lost all its sessions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import ParamSpec

from rallypoint.base.endpoint import is_loopback
from rallypoint.coordinator.apply_loop import OperationResult, join_refusal, run_operation
from rallypoint.coordinator.notification_diff import (
    announced_preemption,
    end_notification,
    newly_complete,
    nodes_waiting,
    preemption_notification,
    round_end_notification,
)
from rallypoint.coordinator.placement import placements, progress, standing_without
from rallypoint.coordinator.recovery import (
    earlier_identity,
    end_of,
    missed_notifications,
    recovered,
    recovery_timeout,
    with_later_rounds,
)
from rallypoint.coordinator.session_registry import SessionRecord, SessionRegistry
from rallypoint.membership.decisions import ClockView, backoff_ends, last_call_decides, needs_all
from rallypoint.membership.liveness import Liveness
from rallypoint.membership.observer import StallObserver
from rallypoint.membership.operations import Close, Drain, Exit, Fail, Join, Operation, Preempt, Succeed
from rallypoint.membership.state import (
    NodeId,
    NodeInfo,
    Reason,
    Settings,
    State,
    known_to,
    name_of,
    nodes_waiting_alike,
)
from rallypoint.protocol.messages import (
    ConfigDiffers,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    Notification,
    Placed,
    Placement,
    ProgressRequest,
    Request,
    ResumeRequest,
    RoundEnded,
)

P = ParamSpec("P")
OutgoingNotification = tuple[int, Notification]

_MAX_DIFFERENCES = 32
"""Of which one session is told."""
_SILENCE_DETAIL = "nothing was heard from it for {:g} s"
_NOT_BACK_DETAIL = "it has not come back to the control plane"
"""What there is to say of how a node was lost."""
_CUT_OFF_DETAIL = "no node at all was heard for {:g} s, so the control plane was cut off"
_REPLACED_DETAIL = "its node has opened another"
"""What else there is to say of why a session was ended."""


class Coordinator:
    """All sessions of one job and the state that they share."""

    def __init__(self, settings: Settings, incarnation: str = "", *, learns_settings: bool = False) -> None:
        """Begin with an empty state.

        Args:
            settings: of the job.
            incarnation: a name that no other coordinator of the job has had.
            learns_settings: whether `settings` are only those of the first node to come, so that one that held a place
                in the job before us knows better.
        """
        self.settings = settings
        self._learns_settings = learns_settings
        self.incarnation = incarnation
        self.state = State()
        self._observer = StallObserver(settings)
        self.sessions = SessionRegistry(Liveness(settings.lease, recovery_timeout(settings)))
        self._pending: dict[NodeId, Join] = {}
        self._deadlines: list[tuple[float, NodeId]] = []
        self._all_released = False
        self._ticked_at = -math.inf
        self._sends: list[OutgoingNotification] = []
        self._ended: list[tuple[int, str]] = []
        self._completed_a_round = False
        """Whether a round was completed here, and not only taken over from a coordinator before us."""
        self._restored = False
        """Whether a node has said that it had a place."""
        self._placeholders_until: float | None = None

    def restore(self, state: State, now: float) -> None:
        """Go on where a coordinator of our incarnation, which is no more, had left the state."""
        self.state = state
        self._restored = bool(state.origin)
        self._completed_a_round = not self._restored and (state.complete or state.round > 0)
        self._observer.observe(state, now)
        for node in known_to(state):
            self.sessions.reserve(node)
        if self._any_unreported():
            self._placeholders_until = now + recovery_timeout(self.settings)

    # What happens to the coordinator. Each returns what is to be sent.

    def open(
        self,
        session: int,
        node: NodeId,
        now: float,
        *,
        address: str,
        server_address: str = "",
        leased: bool = True,
        at_home: bool = False,
        near: bool = False,
        seen: str = "",
        settings: Settings | None = None,
    ) -> NodeId:
        """A node, which was started with `settings`, has made itself known; its agent may be `near`: our own process.
        `seen` is the address that its connection shows.

        Returns the name it goes by: its own, unless that was given before.
        """
        opened = SessionRecord(
            node, address, server_address, settings, in_this_process=near or at_home, observed_address=seen
        )
        return self.sessions.open(session, opened, now, leased=leased, at_home=at_home)

    def receive(self, session: int, request: Request, now: float) -> list[OutgoingNotification]:
        """A node has sent a request."""
        speaker = self.sessions.get(session)
        if speaker is None:
            return []
        self._node_heard(session, now)
        self._RECEIVE[type(request)](self, session, speaker, request, now)
        return self._pop_sends()

    def heartbeat(self, session: int, now: float) -> bool:
        """A node lives. Returns whether the session is one; the answer is left to who asks."""
        if self.sessions.get(session) is None:
            return False
        self._node_heard(session, now)
        return True

    def close(
        self, session: int, now: float, reason: Reason = Reason.LOST, detail: str = ""
    ) -> list[OutgoingNotification]:
        """A session has ended, in the way that `detail` says; its node is gone, unless it had left before."""
        self._end(session, now, reason, detail)
        return self._pop_sends()

    def nodes_lost(self, nodes: Iterable[NodeId], now: float, detail: str = "") -> list[OutgoingNotification]:
        """These nodes are no more, as others know; of those that have a session, the session is the better evidence."""
        for node in nodes:
            if node not in self.sessions:
                self._change(now, self._run, node, Exit(Reason.LOST, detail), now)
        if self._placeholders_until is not None and not self._any_unreported():
            self._all_reported()
        return self._pop_sends()

    def tick(self, now: float) -> list[OutgoingNotification]:
        """Time has passed: end silent sessions, and look at the joins that wait for a moment."""
        self._ticked_at = now
        silence = self.sessions.liveness.check(now)
        for session in silence.lost:
            silent = _SILENCE_DETAIL.format(self.settings.lease)
            self._ended.append((session, silent))
            self._end(session, now, Reason.LOST, silent)
        for session in silence.out_of_reach:
            self._ended.append((session, _CUT_OFF_DETAIL.format(recovery_timeout(self.settings))))
            self._release_session(session, now)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, node = heapq.heappop(self._deadlines)
            self._change(now, self._retry_join, node, now)
        if self._placeholders_until is not None and now >= self._placeholders_until:
            for node in sorted(self._unreported()):
                self._change(now, self._run, node, Exit(Reason.LOST, _NOT_BACK_DETAIL), now)
            self._all_reported()
        if self._waits_for_time():
            self._change(now, self._retry_join, next(iter(self.state.participants)), now)
        return self._pop_sends()

    def wake_at(self) -> float:
        """When `tick` has something to do, in seconds on the clock of `now`; infinity for never."""
        moments = [self.sessions.liveness.check_at()]
        if self._deadlines:
            moments.append(self._deadlines[0][0])
        if self._placeholders_until is not None:
            moments.append(self._placeholders_until)
        view = self._observer.clock_view(0.0)
        if self._waits_for_time():
            moments += [each for each in self._completion_times(view) if each > self._ticked_at]
        return min(moments)

    def _completion_times(self, view: ClockView) -> list[float]:
        """When the round that forms may be complete by the passing of time alone."""
        moments = [backoff_ends(self.state, view)] if self.state.restart_delay else []
        if view.last_call_at is not None and last_call_decides(self.state):
            moments.append(view.last_call_at + self.settings.last_call_timeout)
        return moments

    def pop_ended_sessions(self) -> list[tuple[int, str]]:
        """Sessions that were ended by us since this was last asked, and why: their connections are of no more use."""
        ended, self._ended = self._ended, []
        return ended

    def has_session(self, session: int) -> bool:
        """Whether the session is still open; one that was silent for too long is not."""
        return self.sessions.get(session) is not None

    # Requests.

    def _on_join(self, session: int, speaker: SessionRecord, request: JoinRequest, now: float) -> None:
        node_info = request.node_info
        speaker.repeats_join = False
        speaker.addresses = request.addresses
        self._report_differences(session, speaker, node_info)
        if speaker.skips_join:
            speaker.skips_join = False
            return
        if not node_info.address:
            node_info = node_info._replace(address=speaker.address)
        asked = Join(node_info, now + request.timeout, now - request.waited, self.state.abandoned.number)
        self._start_join(speaker.node, asked, now)

    def _report_differences(self, session: int, speaker: SessionRecord, node_info: NodeInfo) -> None:
        """Tell a node once if it was started in another way than the job."""
        own, job, state = speaker.settings, self.settings, self.state
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
            self._sends.append((session, ConfigDiffers(name_of(state, speaker.node), found)))

    def _on_leave(self, session: int, speaker: SessionRecord, request: LeaveRequest, now: float) -> None:
        self._pending.pop(speaker.node, None)
        self._change(now, self._run, speaker.node, Exit(), now)
        if request.wants_reply:
            left = standing_without(self.state, speaker.node, self.settings)
            # When a node of our own process leaves, we go too.
            goes_on = left.goes_on and speaker.node not in self.sessions.local_nodes
            self._sends.append((session, left._replace(goes_on=goes_on)))

    def _on_operation(self, _session: int, speaker: SessionRecord, request: Operation, now: float) -> None:
        self._change(now, self._run, speaker.node, request, now)

    def _on_resume_state(self, session: int, speaker: SessionRecord, request: ResumeRequest, now: float) -> None:
        if not request.node_info.address:
            request = request._replace(node_info=request.node_info._replace(address=speaker.address))
        earlier = request.node if request.incarnation == self.incarnation else None
        if earlier is None:  # it may have met another coordinator since, whose round never was
            ours = self.state._replace(origin=self.state.origin or self.incarnation)
            earlier = earlier_identity(ours, speaker.node, request)
        if earlier is not None:
            ended = self.sessions.resume(session, earlier)
            self._ended += [] if ended is None else [(ended, _REPLACED_DETAIL)]
            if self._placeholders_until is not None and not self._any_unreported():
                self._all_reported()
        elif self._completed_a_round:
            self.state = with_later_rounds(self.state, request)
        # What it told a coordinator of our name may not have been kept: the name is known to it by a heartbeat alone.
        if not self._completed_a_round and (earlier is None or (request.round >= 0 and not self.state.knows(earlier))):
            self._restore_from_node(speaker, request, now)
        if self.state.verdict is not None:
            self._sends.append((session, end_notification(self.state, speaker.node, self.state.verdict)))
            return
        told = missed_notifications(self.state, speaker.node, request)
        speaker.skips_join = request.joining and bool(told)
        speaker.repeats_join = request.joining and not told
        if any(isinstance(each, Placed) and each.placement.group_rank == 0 for each in told):
            self._notify_peers(speaker.node)
        self._sends += [(session, self._with_session_data(each)) for each in told]
        if not told and self.state.complete and self.state.wait_list and self._placeholders_until is None:
            self._sends.append((session, nodes_waiting(self.state)))

    def _restore_from_node(self, speaker: SessionRecord, request: ResumeRequest, now: float) -> None:
        if self._learns_settings and request.round >= 0 and not self._restored and speaker.settings is not None:
            # Who comes back knows what the job was started with; whoever came first may know nothing of it.
            self.settings = speaker.settings._replace(run_id=self.settings.run_id)
            liveness = self.sessions.liveness
            liveness.lease, liveness.outage_timeout = self.settings.lease, recovery_timeout(self.settings)
        if request.group_world_size > self.settings.max_nodes:
            return  # there was no such round of this job
        self._restored = self._restored or request.round >= 0
        before = self.state
        self.state = recovered(before, speaker.node, request, self.settings)
        if self.state is before:
            return
        self._observer.observe(self.state, now)
        if self._any_unreported() and self._placeholders_until is None:
            self._placeholders_until = now + recovery_timeout(self.settings)
        if before.complete and self.state.round > before.round:
            end = RoundEnded(end_of(self.state, before.round))
            self._send_to(before.participants, end)
        elif not newly_complete(before, self.state):
            self._notify(before, self.state)
        self._change(now, self._retry_all_joins, now)
        if not self._any_unreported():
            self._all_reported()

    def _all_reported(self) -> None:
        """Nobody is awaited any more of those who were in the job when we were filled."""
        self._placeholders_until = None
        state = self.state
        if state.complete and state.wait_list:
            self._notify_participants(nodes_waiting(state))

    def _on_progress_request(self, session: int, speaker: SessionRecord, _request: ProgressRequest, now: float) -> None:
        node, view = speaker.node, self._observer.clock_view(now)
        left, reports = self._ends_at(node) - now, self._reports_progress(node)
        how_far = progress(
            self.state, node, self.settings, view, ends_in=left if left < math.inf else -1.0, reports=reports
        )
        self._sends.append((session, how_far))

    def _ends_at(self, node: NodeId) -> float:
        """When the time of what a node waits for is over: its own, or, where all are needed, that of the first."""
        own = self._pending.get(node)
        if own is None or node in self.state.redundancy_list:
            return math.inf
        if not needs_all(self.state, self.settings):
            return own.deadline
        while self._deadlines and not self._is_pending_deadline(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else own.deadline

    def _is_pending_deadline(self, deadline: float, node: NodeId) -> bool:
        """Whether that is still the deadline of a join that waits."""
        join = self._pending.get(node)
        return join is not None and join.deadline == deadline

    def _reports_progress(self, node: NodeId) -> bool:
        """Whether a node tells people how far things are: of those who wait alike, who lives here, or the first."""
        alike = nodes_waiting_alike(self.state, node)
        return node == next((each for each in self.sessions.nodes_in_this_process if each in alike), next(iter(alike)))

    def _on_heartbeat(self, session: int, _speaker: SessionRecord, request: Heartbeat, _now: float) -> None:
        self._sends.append((session, request))

    _RECEIVE: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        JoinRequest: _on_join,
        LeaveRequest: _on_leave,
        Fail: _on_operation,
        Succeed: _on_operation,
        Drain: _on_operation,
        Preempt: _on_operation,
        Close: _on_operation,
        ResumeRequest: _on_resume_state,
        ProgressRequest: _on_progress_request,
        Heartbeat: _on_heartbeat,
    }

    # Running operations.

    def _start_join(self, node: NodeId, join: Join, now: float) -> None:
        self._keep_waiting(node, join)
        self._change(now, self._retry_join, node, now)

    def _retry_join(self, node: NodeId, now: float) -> None:
        """Take a waiting join as far as it goes now."""
        join = self._pending.get(node)
        if join is None:
            return
        before = self.state
        ran = self._run(node, join, now)
        if ran.final_action is not None:
            self._pending.pop(node, None)
            refused = join_refusal(ran, node, before, self.state, self.settings, self._observer.clock_view(now))
            if refused is not None:
                self._send_to([node], refused)
        elif isinstance(ran.operation, Join) and ran.operation is not join:
            self._keep_waiting(node, ran.operation)

    def _keep_waiting(self, node: NodeId, join: Join) -> None:
        self._pending[node] = join
        if join.deadline < math.inf:
            heapq.heappush(self._deadlines, (join.deadline, node))

    def _run(self, node: NodeId, operation: Operation, now: float) -> OperationResult:
        def write(state: State) -> None:
            self.state = state
            self._observer.observe(state, now)

        return run_operation(
            operation, node, self.settings, lambda: self.state, lambda: self._observer.clock_view(now), write
        )

    # From one state to the next.

    def _change(self, now: float, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Take a step, tell whom the change concerns, and look again at all joins while it could matter to them."""
        before = self.state
        step(*args, **kwargs)
        while before is not self.state:
            after = self.state
            self._notify(before, after)
            if not _may_unblock_joins(before, after, self.settings):
                return
            before = after
            self._retry_all_joins(now)

    def _retry_all_joins(self, now: float) -> None:
        for node in list(self._pending):
            self._retry_join(node, now)

    def _notify(self, before: State, after: State) -> None:
        if after.verdict is not None and before.verdict is None:
            self._pending.clear()
            for session, each in self.sessions:
                self._sends.append((session, end_notification(after, each.node, after.verdict)))
            return
        if before.complete and after.round > before.round:
            end = RoundEnded(round_end_notification(before, after))
            survivors = [node for node in before.participants if after.knows(node)]
            # Who had succeeded and was out of reach for a while has no place there any more, but waits for the rest.
            survivors += sorted(before.succeeded.difference(before.participants))
            self._send_to(survivors, end)
        if newly_complete(before, after):
            self._placements(after)
        elif after.complete and len(after.wait_list) != len(before.wait_list) and self._placeholders_until is None:
            self._notify_participants(nodes_waiting(after))
        warning = preemption_notification(before, after)
        if warning is not None:
            self._notify_participants(warning, but=announced_preemption(after))

    def _notify_participants(self, notification: Notification, but: NodeId | None = None) -> None:
        self._send_to([node for node in self.state.participants if node != but], notification)

    def _send_to(self, nodes: Iterable[NodeId], notification: Notification) -> None:
        """Who has no session at the moment asks when it is back."""
        sessions = (self.sessions.session_of(node) for node in nodes)
        self._sends += [(session, notification) for session in sessions if session is not None]

    def _placements(self, state: State) -> None:
        self._completed_a_round = True
        control_rank = self._control_rank()
        for node, placement in placements(state).items():
            self._pending.pop(node, None)
            if node in self.sessions:
                self._drop_repeated_join(node)
                if placement.group_rank == 0:
                    self._notify_peers(node)
                known = self._reachable(placement)._replace(origin=self.incarnation, control_rank=control_rank)
                self._send_to([node], Placed(known))

    def _notify_peers(self, host: NodeId) -> None:
        """Tell the host of the round's store from where workers come, where the nodes have said that."""
        if any(each.addresses is not None for _, each in self.sessions):
            from rallypoint.coordinator.store_peers import peers_notification

            for notification in peers_notification(self.state, self.sessions):
                self._send_to([host], notification)

    def _drop_repeated_join(self, node: NodeId) -> None:
        """A node has its place by the join that it had said before; the one that it says again means no other."""
        session = self.sessions.session_of(node)
        speaker = None if session is None else self.sessions.get(session)
        if speaker is not None and speaker.repeats_join:
            speaker.skips_join, speaker.repeats_join = True, False

    def _reachable(self, placement: Placement) -> Placement:
        """A host in our own process may know itself by a loopback address only: then use what remote nodes call us."""
        if not is_loopback(placement.store_address):
            return placement
        return placement._replace(store_address=self.sessions.own_external_address or placement.store_address)

    def _with_session_data(self, notification: Notification) -> Notification:
        """What the pure rooms say of a place, with what only sessions tell."""
        if not isinstance(notification, Placed):
            return notification
        origin = self.state.origin or self.incarnation
        return Placed(
            self._reachable(notification.placement)._replace(origin=origin, control_rank=self._control_rank())
        )

    def _control_rank(self) -> int:
        places = self.state.participants
        return next((places[node].rank for node in self.sessions.local_nodes if node in places), -1)

    def _waits_for_time(self) -> bool:
        """Whether the round that forms may be complete by the passing of time alone."""
        state = self.state
        if state.complete or not state.participants or state.closed:
            return False
        return bool(state.restart_delay) or (bool(state.last_call) and last_call_decides(state))

    # The end of sessions.

    def _end(self, session: int, now: float, reason: Reason, detail: str = "") -> None:
        gone = self.sessions.close(session)
        if gone is None:
            return
        self._pending.pop(gone.node, None)
        self.sessions.forget(gone.node)
        self._change(now, self._run, gone.node, Exit(reason, detail), now)

    def _release_session(self, session: int, now: float) -> None:
        """Law 5: a node of a round that runs may well run on. What others have asked for, they will ask again."""
        speaker = self.sessions.get(session)
        if speaker is not None and self.state.complete and speaker.node in self.state.participants:
            self.sessions.close(session)
            self._pending.pop(speaker.node, None)
            self._all_released = True
        else:
            self._end(session, now, Reason.LOST, _SILENCE_DETAIL.format(recovery_timeout(self.settings)))

    def _node_heard(self, session: int, now: float) -> None:
        self.sessions.liveness.heard(session, now)
        if self._all_released:
            self._all_released = False
            self._placeholders_until = now + recovery_timeout(self.settings)

    def _unreported(self) -> set[NodeId]:
        """Those who take part and are yet to speak."""
        return {node for node in known_to(self.state) if node not in self.sessions}

    def _any_unreported(self) -> bool:
        state = self.state
        known = chain(state.participants, state.wait_list, state.redundancy_list, state.survivors)
        return any(node not in self.sessions for node in known)

    def _pop_sends(self) -> list[OutgoingNotification]:
        sends, self._sends = self._sends, []
        return sends


def _may_unblock_joins(before: State, after: State, settings: Settings) -> bool:
    """Whether a join that waited before could do something now.

    Another node's arrival in a round that forms matters to nobody who waits, except that it may start the last call or
    be the one that was awaited. This keeps a rendezvous of n nodes at n looks instead of n squared.
    """
    if (before.round, before.complete, before.closed) != (after.round, after.complete, after.closed):
        return True
    if before.abandoned.number != after.abandoned.number:
        return True
    seats_before = len(before.participants) + len(before.wait_list) + len(before.survivors)
    seats_after = len(after.participants) + len(after.wait_list) + len(after.survivors)
    if seats_after < seats_before and seats_after < settings.max_nodes:
        return True
    reforms = after.round > 0 and not after.complete
    return reforms and not after.survivors and not after.wait_list and len(after.participants) >= settings.min_nodes
