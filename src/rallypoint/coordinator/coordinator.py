"""The coordinator: it decides for all nodes in one place.

It runs the pure core over one state. A node sends its operation once over its session and is notified when it is done;
all waiting joins are checked again when the state changes in a way that could matter to them. Nothing polls.

This module does no I/O: sessions are numbers, `now` is passed in, and messages to send are returned as a list. The
shell around it (`dispatcher`) delivers.

Laws:

1. A session belongs to one node. Its end is the node's end, at once, unless the node has opened another one.
2. A session that is silent for the lease has ended (`liveness`).
3. Every notification follows from comparing the state before and after; nothing is sent twice for one change.
4. A session that claims the name of an earlier one of ours replaces it, with all that its node holds. So no name is
   given twice.
5. If it is we who are cut off, the sessions are released after a while. A running round then continues: a node that
   comes back still has its place, and the others are awaited like nodes that have not yet reported to a new
   coordinator.
6. A successor with the full state of a coordinator (`restore`) takes its name: to the nodes it is the same one, which
   has lost all its sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rallypoint.base.light_typing import TYPE_CHECKING, get_args
from rallypoint.coordinator.job_state import JobState, OutgoingNotification
from rallypoint.coordinator.notifications import end_notification, nodes_waiting, progress, standing_without
from rallypoint.coordinator.recovery import (
    earlier_identity,
    end_of,
    may_have_been,
    missed_notifications,
    recovered,
    recovery_timeout,
    with_later_rounds,
    with_size,
    without_given_up_join,
)
from rallypoint.coordinator.session_registry import SessionRecord
from rallypoint.membership.operations import Close, Exit, Join, NodeOperation, Operation, PreemptJob, RecordProgress
from rallypoint.membership.state import (
    NodeId,
    Reason,
    Settings,
    State,
    known_to,
    name_of,
)
from rallypoint.protocol.messages import (
    Confirmed,
    ConfirmRequest,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    Placed,
    ProgressRequest,
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.protocol.operator_messages import NodeAnswer

if TYPE_CHECKING:
    from rallypoint.coordinator.hangs import HangCollection
    from rallypoint.coordinator.watchers import Watchers
    from rallypoint.protocol.observation import WatcherNotification, WatcherRequest

_SILENCE_DETAIL = "nothing was heard from it for {:g} s"
_NOT_BACK_DETAIL = "it has not come back to the control plane"
_CUT_OFF_DETAIL = "no node at all was heard for {:g} s, so the control plane was cut off"
_CONCERNS_ALL = (Close, PreemptJob, RecordProgress)
"""The operations with which a node can change the job without a place in its round."""
_REPLACED_DETAIL = "its node has opened another"
"""Texts for how a node was lost, and for why a session was ended."""


class Coordinator(JobState):
    """Decides for all nodes of one job; its methods return the messages to send."""

    def __init__(self, settings: Settings, incarnation: str = "", *, learns_settings: bool = False) -> None:
        """Begin with an empty state.

        Args:
            settings: the settings of the job.
            incarnation: a name that no other coordinator of the job has had.
            learns_settings: whether `settings` are only those of the first node, so that those of a node which had a
                place in the job before us take precedence.
        """
        super().__init__(settings, incarnation)
        self._learns_settings = learns_settings
        self._watchers: Watchers | None = None
        """Set once there was a watcher."""
        self._all_released = False
        self._ticked_at = -math.inf
        self._ended: list[tuple[int, str]] = []
        self._restored = False
        """Whether a node has reported that it had a place."""

    def restore(self, state: State, now: float) -> None:
        """Continue with the state that a previous coordinator of our incarnation has left."""
        self.state = state
        self._restored = bool(state.origin)
        self._completed_a_round = not self._restored and (state.complete or state.round > 0)
        self._observer.observe(state, now)
        self._take_size(state)
        self.history.taken_over(State(), state, now)
        for node in known_to(state):
            self.sessions.reserve(node)
        if self._any_unreported():
            self._placeholders_until = now + recovery_timeout(self.settings)

    # Events of the coordinator; each returns the messages to send.

    def open(self, number: int, session: SessionRecord, now: float) -> NodeId:
        """A node has connected. Returns its name: the requested one, unless that was given before."""
        self.sessions.open(number, session, now)
        return session.node

    def receive(self, session: int, request: Request, now: float) -> list[OutgoingNotification]:
        """A node has sent a request."""
        speaker = self.sessions.get(session)
        if speaker is None:
            return []
        self._node_heard(session, now)
        self._RECEIVE[type(request)](self, speaker, request, now)
        return self._pop_sends()

    def heartbeat(self, session: int, now: float) -> bool:
        """A node is alive. Returns whether the session exists; the caller sends the answer."""
        if self.sessions.get(session) is None:
            return False
        self._node_heard(session, now)
        return True

    def close(
        self, session: int, now: float, reason: Reason = Reason.LOST, detail: str = ""
    ) -> list[OutgoingNotification]:
        """A session has ended, in the way that `detail` says; its node is gone, unless it had left before."""
        of_watcher = self._watchers is not None and self._watchers.close(session)
        if not of_watcher and not self.sessions.hand_over(session, self.state.knows):
            self._end([session], now, reason, detail)
        return self._pop_sends()

    def nodes_lost(self, nodes: Iterable[NodeId], now: float, detail: str = "") -> list[OutgoingNotification]:
        """These nodes are lost according to others; for nodes with a session, the session is the better evidence."""
        self._lose([each for each in nodes if each not in self.sessions], now, Reason.LOST, detail)
        self._check_all_reported()
        return self._pop_sends()

    @property
    def watchers(self) -> Watchers:
        """The sessions that are not nodes."""
        if self._watchers is None:
            from rallypoint.coordinator.watchers import Watchers

            self._watchers = Watchers(self)
            self.on_change = self._watchers.changed
        return self._watchers

    def receive_from_watcher(
        self, session: int, request: WatcherRequest, now: float, refusal: str = ""
    ) -> list[OutgoingNotification]:
        """A watcher has sent a message. See `Watchers.receive`; messages to watchers are in `Watchers.sends`."""
        self.watchers.receive(session, request, now, refusal)
        return self._pop_sends()

    def pop_watcher_sends(self) -> list[tuple[int, WatcherNotification]]:
        """Take the messages for watchers."""
        if self._watchers is None:
            return []
        sends, self._watchers.sends = self._watchers.sends, []
        return sends

    def _on_answer(self, speaker: SessionRecord, answer: NodeAnswer, now: float) -> None:
        for each in self._occasional():
            each.answered(speaker.node, answer, now)

    def tick(self, now: float) -> list[OutgoingNotification]:
        """Time has passed: end silent sessions, and check the joins that wait for a moment."""
        self._ticked_at = now
        silence = self.sessions.liveness.check(now)
        silent = _SILENCE_DETAIL.format(self.settings.lease)
        self._ended += [(session, silent) for session in silence.lost]
        self._end(silence.lost, now, Reason.LOST, silent)
        for session in silence.out_of_reach:
            self._ended.append((session, _CUT_OFF_DETAIL.format(recovery_timeout(self.settings))))
            self._release_session(session, now)
        while (late := self._pending.pop_due(now)) is not None:
            self._change(now, self._retry_join, late, now)
        if self._placeholders_until is not None and now >= self._placeholders_until:
            self._lose(sorted(self._unreported()), now, Reason.LOST, _NOT_BACK_DETAIL)
            self._all_reported()
        if self._waits_for_time():
            self._change(now, self._retry_join, next(iter(self.state.participants)), now)
        for each in self._occasional():
            each.tick(now)
        return self._pop_sends()

    def _occasional(self) -> list[Watchers | HangCollection]:
        """The parts that only some jobs have."""
        return [each for each in (self._watchers, self.hangs) if each is not None]

    def wake_at(self) -> float:
        """The time at which `tick` has something to do, in seconds on the clock of `now`; infinity for never."""
        moments = [self.sessions.liveness.check_at(), self._pending.next_deadline()]
        moments += [each.wake_at() for each in self._occasional()]
        if self._placeholders_until is not None:
            moments.append(self._placeholders_until)
        if self._waits_for_time():
            moments += [each for each in self._completion_times() if each > self._ticked_at]
        return min(moments)

    def pop_ended_sessions(self) -> list[tuple[int, str]]:
        """Sessions that were ended by us since the last call, and why: their connections must be closed."""
        ended, self._ended = self._ended, []
        return ended

    # Requests

    def _on_join(self, speaker: SessionRecord, request: JoinRequest, now: float) -> None:
        node_info = request.node_info
        speaker.repeats_join = False
        speaker.addresses = request.addresses
        self._report_differences(speaker, node_info)
        if speaker.skips_join:
            speaker.skips_join = False
            return
        if not node_info.address:
            node_info = node_info._replace(address=speaker.address)
        asked = Join(node_info, now + request.timeout, now - request.waited, self.state.abandoned.number)
        self._pending.add(speaker.node, asked)
        self._change(now, self._retry_join, speaker.node, now)

    def _on_leave(self, speaker: SessionRecord, request: LeaveRequest, now: float) -> None:
        self._pending.remove(speaker.node)
        self._change(now, self._run, speaker.node, Exit(), now)
        if request.wants_reply:
            left = standing_without(self.state, speaker.node, self.settings)
            # When a node of our own process leaves, we go too.
            goes_on = left.goes_on and speaker.node not in self.sessions.local_nodes
            self._reply(speaker, left._replace(goes_on=goes_on))

    def _on_operation(self, speaker: SessionRecord, request: Operation, now: float) -> None:
        if isinstance(request, _CONCERNS_ALL) and self.is_stranger(speaker):
            self._refuse(speaker, now)
            return
        self._change(now, self._run, speaker.node, request, now)

    def _refuse(self, speaker: SessionRecord, now: float) -> None:
        """A stranger wants to end or change the job. One that waits for a place keeps waiting."""
        from rallypoint.coordinator.peer_access import STRANGER_REFUSED

        if not self.state.knows(speaker.node):
            self._ended.append((speaker.number, STRANGER_REFUSED))
            self._end([speaker.number], now, Reason.LOST, STRANGER_REFUSED)
        elif not speaker.refused:
            speaker.refused = True
            what = f"{name_of(self.state, speaker.node)} may not end or change the job: {STRANGER_REFUSED}"
            self.history.add("command", self.state.round, what, now)

    def _claimed_name(self, speaker: SessionRecord, request: ResumeRequest, stranger: bool) -> NodeId | None:
        """The name of ours that a node claims to have; to a stranger only one that has its session at its address."""
        earlier = self.sessions.name_of(request.incarnation, request.node)
        earlier = earlier or earlier_identity(self.state, self.incarnation, speaker.node, request)
        if earlier is None or not stranger:
            return earlier
        number = self.sessions.session_of(earlier)
        holder = None if number is None else self.sessions.get(number)
        is_there = holder is not None and holder.observed_address == speaker.observed_address
        return earlier if is_there else None

    def _on_resume_state(self, speaker: SessionRecord, request: ResumeRequest, now: float) -> None:
        if not request.node_info.address:
            request = request._replace(node_info=request.node_info._replace(address=speaker.address))
        # What a stranger says that it holds is not believed, unless nodes are awaited that may come from anywhere.
        stranger = bool(self._hosts) and self._placeholders_until is None and self.is_stranger(speaker)
        earlier = self._claimed_name(speaker, request, stranger)
        if earlier is not None:
            ended = self.sessions.resume(speaker, earlier)
            self._ended += [] if ended is None else [(ended, _REPLACED_DETAIL)]
            self._change(now, self._write, without_given_up_join(self.state, speaker.node, request, self.settings), now)
            self._sends = [each for each in self._sends if each[0] != speaker.number]  # it knows nothing of that round
            self._check_all_reported()
        if request.incarnation != self.incarnation and not stranger:
            self.sessions.reported(speaker, request.incarnation, request.node)
        if self._completed_a_round and not stranger:
            self.state = with_later_rounds(self.state, request)
        # What it told a coordinator of our name may not have been kept: the name is known to it by a heartbeat alone.
        if not (self._completed_a_round or stranger) and (
            earlier is None or (request.round >= 0 and not self.state.knows(earlier))
        ):
            self._restore_from_node(speaker, request, now)
        if self.state.complete and speaker.node in self.state.participants:
            self._note_host(speaker.node)
        if self.state.verdict is not None:
            self._reply(speaker, end_notification(self.state, speaker.node, self.state.verdict))
            return
        told = missed_notifications(self.state, speaker.node, request, self._placements)
        speaker.skips_join = request.joining and bool(told)
        speaker.repeats_join = request.joining and not told
        for each in told:
            if isinstance(each, Placed):
                self._send_placed(speaker.node, each.placement)
            else:
                self._reply(speaker, each)
        if self.hangs is not None:
            self.hangs.resumed(speaker.node, self.state)
        if not told and self.state.complete and self.state.wait_list and self._placeholders_until is None:
            self._reply(speaker, nodes_waiting(self.state))

    def _restore_from_node(self, speaker: SessionRecord, request: ResumeRequest, now: float) -> None:
        if self._learns_settings and request.round >= 0 and not self._restored and speaker.settings is not None:
            # A node that comes back knows the settings of the job; the first node may not know them.
            self.settings = speaker.settings._replace(run_id=self.settings.run_id)
            self._started_with = self.settings
            liveness = self.sessions.liveness
            liveness.lease, liveness.outage_timeout = self.settings.lease, recovery_timeout(self.settings)
        self.state = with_size(self.state, speaker.node, request, self.settings)
        self._take_size(self.state)
        if not may_have_been(request, self.settings) and not may_have_been(request, self._started_with):
            return
        self._restored = self._restored or request.round >= 0
        before = self.state
        self.state = recovered(before, speaker.node, request, self.settings)
        if self.state is before:
            return
        if self.state.verdict is not None:
            self._notify(before, self.state)
        self._observer.observe(self.state, now)
        self.history.taken_over(before, self.state, now)
        if self._any_unreported() and self._placeholders_until is None:
            self._placeholders_until = now + recovery_timeout(self.settings)
        if before.complete and self.state.round > before.round:
            self.send_to(before.participants, RoundEnded(end_of(self.state, before.round)))
        self._change(now, self._retry_all_joins, now)
        if not self._any_unreported():
            self._all_reported()

    def _on_progress_request(self, speaker: SessionRecord, _request: ProgressRequest, now: float) -> None:
        node, view = speaker.node, self._observer.clock_view(now)
        ends_at, reports = self._ends_at(node), self._reports_progress(node)
        ends_in = ends_at - now if ends_at < math.inf else -1.0
        self._reply(speaker, progress(self.state, node, self.settings, view, ends_in=ends_in, reports=reports))

    def _on_confirm_request(self, speaker: SessionRecord, request: ConfirmRequest, _now: float) -> None:
        self._reply(speaker, Confirmed(request.number))

    def _on_heartbeat(self, speaker: SessionRecord, request: Heartbeat, _now: float) -> None:
        self._reply(speaker, request)

    _RECEIVE: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        JoinRequest: _on_join,
        LeaveRequest: _on_leave,
        **dict.fromkeys(get_args(NodeOperation), _on_operation),
        ResumeRequest: _on_resume_state,
        ProgressRequest: _on_progress_request,
        ConfirmRequest: _on_confirm_request,
        Heartbeat: _on_heartbeat,
        **dict.fromkeys(get_args(NodeAnswer), _on_answer),
    }

    # The end of sessions

    def _end(self, sessions: Iterable[int], now: float, reason: Reason, detail: str = "") -> None:
        gone = [closed.node for each in sessions if (closed := self.sessions.close(each)) is not None]
        for node in gone:
            self._pending.remove(node)
            self.sessions.forget(node)
            for each in self._occasional():
                each.forget(node, now)
        self._lose(gone, now, reason, detail)

    def _release_session(self, session: int, now: float) -> None:
        """Law 5: a node of a running round may well continue. Requests of other nodes will be repeated by them."""
        speaker = self.sessions.get(session)
        if speaker is not None and self.state.complete and speaker.node in self.state.participants:
            self.sessions.close(session)
            self._pending.remove(speaker.node)
            self._all_released = True
        else:
            self._end([session], now, Reason.LOST, _SILENCE_DETAIL.format(recovery_timeout(self.settings)))

    def _node_heard(self, session: int, now: float) -> None:
        self.sessions.liveness.heard(session, now)
        if self._all_released:
            self._all_released = False
            self._placeholders_until = now + recovery_timeout(self.settings)
