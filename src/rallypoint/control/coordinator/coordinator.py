"""The coordinator: decides for all nodes of one job in one place.

The coordinator runs the rules (`control.membership.rules`) over one state. A node sends an operation once per session,
and is notified when it is complete. Waiting joins are checked again when a change of the state might affect them.
Nothing polls. This module does no I/O: sessions are numbers, the caller passes `now`, and each step returns its effects
(`StepResult`), which the shell around it (`dispatcher`) carries out.

Laws:

1. A session belongs to one node. When the session ends, the node is gone at once, unless it has another session.
2. A session that is silent for the lease ends (`sessions.Liveness`).
3. Every notification follows from a comparison of the states before and after; no change is notified twice.
4. A node that returns in another session is the same node, no matter which coordinators it met in between.
5. If this coordinator itself is cut off, it releases the sessions after a while. A running round continues: a node that
   returns still has its place, and the coordinator awaits the others as a new coordinator awaits nodes that have not
   reported.
6. A successor with a coordinator's full state (`restore`) takes over its name. To the nodes it is the same coordinator,
   without its sessions.
7. After a round its nodes join again, or all keep their places. They keep them if a failure ended the round on a node
   that restarts all its workers, nothing delays the next round, no node is gone or about to go, each node reported in
   its session that it needs no request, and the node with group rank 0 reported where the next store will be (decision
   3).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from rallypoint.base.light_typing import Any, NamedTuple, get_args
from rallypoint.control.coordinator.extensions import Extensions
from rallypoint.control.coordinator.notifications import (
    JobHistory,
    end_notifications,
    join_refusal,
    newly_complete,
    nodes_succeeded,
    nodes_waiting,
    notification_diff,
    placeholders_in,
    placements,
    progress,
    progress_for,
    standing_without,
)
from rallypoint.control.coordinator.recovery import (
    end_of,
    may_have_been,
    missed_notifications,
    recovered,
    with_later_rounds,
    with_size_of,
    without_given_up_join,
)
from rallypoint.control.coordinator.sessions import (
    STRANGER_REFUSED,
    Liveness,
    SessionRecord,
    SessionRegistry,
    SessionState,
)
from rallypoint.control.membership.observer import StateObserver
from rallypoint.control.membership.rules import (
    ClockView,
    backoff_ends,
    is_settled,
    last_call_decides,
    needs_all,
    renewed,
    step,
)
from rallypoint.control.membership.state import (
    DEFAULT_RUN_ID,
    Close,
    Exit,
    Join,
    NoChange,
    NodeId,
    NodeInfo,
    NodeOperation,
    Operation,
    PreemptJob,
    Reason,
    RecordProgress,
    Refusal,
    Rejoin,
    Settings,
    State,
    known_to,
    name_of,
    nodes_waiting_alike,
    recovery_timeout,
)
from rallypoint.control.protocol.messages import (
    ConfigDiffers,
    JoinRefused,
    JoinRequest,
    LeaveRequest,
    NextStore,
    Notification,
    Placed,
    Placement,
    Progress,
    ProgressRequest,
    Request,
    ResumeRequest,
    RoundEnded,
)

OutgoingMessage = tuple[int, Any]
"""The number of a session, and a message for it."""

_SILENCE_DETAIL = "it was silent for {:g} s"
_NOT_BACK_DETAIL = "it did not reconnect to the control plane"
_CUT_OFF_DETAIL = "all nodes were silent for {:g} s, so the control plane was cut off"
_REPLACED_DETAIL = "its node opened another one"
"""How a node was lost, or why a session ended."""
_CONCERNS_ALL = (Close, PreemptJob, RecordProgress)
"""Operations with which a node without a place in the round can change the job."""
_WAITING_EVERY = 1.0
"""Seconds between notifications to a running round about the number of waiting nodes."""
_SUCCEEDED_AFTER, _SUCCEEDED_AFTER_NODE = 1.0, 0.001
"""Seconds before the other nodes are notified of a node's success, and additional seconds per node. Most jobs end
within that time, and the notification goes to all nodes."""
_MOST_GONE = 16
"""Maximum number of nodes, of those lost at once, for which the history records separate events."""
_MAX_DIFFERENCES = 32
"""Maximum number of differences reported per session."""


class StepResult(NamedTuple):
    """The effects of one step. The shell first ends the sessions, then sends the messages."""

    state: State
    """The state after the step: messages follow from it."""
    messages: list[OutgoingMessage]
    ended: list[tuple[int, str]]
    """Sessions that the coordinator ended, and why."""


class Coordinator:
    """Decides for all nodes of one job. Each event except `open` and `heartbeat` returns its effects.

    The effects do not include when `tick` is due: most steps change that, and the shell asks once for many steps
    (`wake_at`).
    """

    def __init__(self, settings: Settings, incarnation: str = "", *, learns_settings: bool = False) -> None:
        """Start with an empty state.

        Args:
            settings: the settings of the job.
            incarnation: a name that no other coordinator of the job has had.
            learns_settings: whether `settings` came only from the first node. Then the settings of a node that had a
                place in the job before us take precedence.
        """
        self.settings = settings
        self._started_with = settings
        """The settings without later changes by an operator."""
        self.learns_settings = learns_settings
        self.incarnation = incarnation
        self.state = State()
        self.sessions = SessionRegistry(Liveness(settings.lease, recovery_timeout(settings)))
        self._observer = StateObserver(settings)
        self._pending: dict[NodeId, Join] = {}
        """The waiting joins."""
        self._deadlines: list[tuple[float, NodeId]] = []
        """A heap of their deadlines. Entries whose join no longer waits, or has a later deadline, are ignored."""
        self._messages: list[OutgoingMessage] = []
        """This step's messages by session, and below them the sessions that it ended: see `StepResult`."""
        self._ended: list[tuple[int, str]] = []
        self.history = JobHistory()
        self.extensions = Extensions(self)
        self._hosts: set[str] = set()
        """Addresses, as we see them, of the nodes in the running or last round."""
        self._hosts_round = -1
        self._placements: tuple[tuple[object, ...], dict[NodeId, Placement]] = ((), {})
        """Inputs of the running round's placements, and the placements."""
        self._next_store = NextStore(-1, 0)
        """The newest of them; valid only for its round."""
        self._completed_a_round = False
        """Whether this coordinator completed a round itself, rather than only taking one over."""
        self._told_waiting: tuple[int, Mapping[NodeId, NodeInfo]] = (-1, {})
        """The round last notified of waiting nodes, and these nodes."""
        self._told_waiting_at = -math.inf
        self._told_succeeded: AbstractSet[NodeId] = frozenset()
        """Nodes of the running round whose success the others know."""
        self._tells_succeeded_at = math.inf
        """When to notify of the next successes."""
        self._last_reply: Notification | None = None
        self._progress: tuple[State, Progress] | None = None
        """A state, and the rendezvous progress in it that a node was sent."""
        self._maybe_unreported: list[NodeId] = []
        """Known nodes that had not reported at the last check; participants are last."""
        self.leads_for = math.inf
        """Seconds for which no other coordinator can be elected, as of the current event."""
        self._restored = False
        """Whether a node reported an earlier place."""
        self._placeholders_until: float | None = None
        """Until when to await known nodes without a session."""
        self._placeholders_of: tuple[object, object, int] = (None, None, 0)
        """The lists of nodes in which placeholders were last counted, and the count."""
        self._all_released = False
        self._ticked_at = -math.inf

    def restore(self, state: State, now: float, history: JobHistory | None = None) -> None:
        """Continue from the state, and perhaps the history, of a previous coordinator with our incarnation."""
        self._set(state, now)
        self._restored = bool(state.origin)
        self._completed_a_round = not self._restored and (state.complete or state.round > 0)
        if history is None:
            self.history.taken_over(State(), state, now)
        else:
            self.history = history
        self.extensions.on_change(State(), state, now)
        if self._any_unreported():
            self._placeholders_until = now + recovery_timeout(self.settings)

    # Events

    def open(self, number: int, session: SessionRecord, now: float) -> None:
        """Add a node's session."""
        self.sessions.open(number, session, now)

    def receive(self, session: int, request: Request, now: float) -> StepResult:
        """Handle a node's request; ignored if the session ended."""
        if (speaker := self.sessions.hear(session, now)) is None:
            return self.take_result()
        if self._all_released:
            self._await_released(now)
        for number in self.sessions.replace_earlier(speaker):
            self._ended.append((number, _REPLACED_DETAIL))
        if speaker.state is SessionState.RESUMING:
            speaker.state = SessionState.OPEN
        if (handle := self._RECEIVE.get(type(request))) is None:
            self.extensions.receive(speaker, request, now)
        else:
            handle(self, speaker, request, now)
        return self.take_result()

    def heartbeat(self, session: int, now: float) -> bool:
        """Handle a node's heartbeat. Returns whether the session exists; the caller sends the answer."""
        if self.sessions.hear(session, now) is None:
            return False
        if self._all_released:
            self._await_released(now)
        return True

    def close(self, session: int, now: float, reason: Reason = Reason.LOST, detail: str = "") -> StepResult:
        """Handle the end of a session, as `detail` describes. Its node is gone, unless it left before."""
        self._end([session], now, reason, detail)
        return self.take_result()

    def nodes_lost(self, numbers: Collection[int], now: float, detail: str = "") -> StepResult:
        """Handle a report that these nodes are lost. A node with a session is not: that is better evidence."""
        lost = [node for node in known_to(self.state) if node.number in numbers and node not in self.sessions]
        self._remove_lost(lost, now, Reason.LOST, detail)
        self._check_all_reported(now)
        return self.take_result()

    def tick(self, now: float) -> StepResult:
        """End silent sessions, and check the joins that wait for a point in time."""
        self._ticked_at = now
        silence = self.sessions.liveness.check(now)
        silent = _SILENCE_DETAIL.format(self.settings.lease)
        self._ended += [(session, silent) for session in silence.lost]
        self._end(silence.lost, now, Reason.LOST, silent)
        for session in silence.out_of_reach:
            self._ended.append((session, _CUT_OFF_DETAIL.format(recovery_timeout(self.settings))))
            self._release_session(session, now)
        while self._next_deadline() <= now:
            self._continue_join(heapq.heappop(self._deadlines)[1], now)
        if self._placeholders_until is not None and now >= self._placeholders_until:
            self._remove_lost(sorted(self._unreported()), now, Reason.LOST, _NOT_BACK_DETAIL)
            self._all_reported(now)
        if self._waits_for_time():
            self._continue_join(next(iter(self.state.participants)), now)
        self._tell_waiting(now)
        self._tell_succeeded(now)
        for extension in self.extensions.loaded:
            extension.tick(now)
        return self.take_result()

    def wake_at(self) -> float:
        """When `tick` next has something to do, in seconds on the clock of `now`; infinity for never."""
        moments = [self.sessions.liveness.check_at(), self._next_deadline(), self._tells_waiting_at()]
        moments.append(self._tells_succeeded_at)
        moments += [extension.wake_at() for extension in self.extensions.loaded]
        if self._placeholders_until is not None:
            moments.append(self._placeholders_until)
        if self._waits_for_time():
            moments += [moment for moment in self._completion_times() if moment > self._ticked_at]
        return min(moments)

    def take_result(self) -> StepResult:
        """Return the effects since the last step."""
        result = StepResult(self.state, self._messages, self._ended)
        self._messages, self._ended = [], []
        return result

    # Requests

    def _on_join(self, speaker: SessionRecord, request: JoinRequest, now: float) -> None:
        node_info = request.node_info
        before, speaker.state = speaker.state, SessionState.OPEN
        speaker.addresses, speaker.keeps_place = request.addresses, request.keeps_place
        if self.settings.run_id == DEFAULT_RUN_ID and (other := self._other_job(speaker, node_info, now)):
            self._reply(speaker, JoinRefused(Refusal.ANOTHER_JOB, other))
            return
        self._report_differences(speaker, node_info)
        if before is SessionState.IGNORES_JOIN:
            return
        if not node_info.address:
            node_info = node_info._replace(address=speaker.address)
        join = Join(node_info, now + request.timeout, now - request.waited, self.state.abandoned.number)
        self._wait(speaker.node, join)
        self._continue_join(speaker.node, now)

    def _on_next_store(self, speaker: SessionRecord, request: NextStore, _now: float) -> None:
        if self.state.runs(speaker.node, request.round) and self.state.participants[speaker.node].rank == 0:
            self._next_store = request

    def _on_leave(self, speaker: SessionRecord, request: LeaveRequest, now: float) -> None:
        self._pending.pop(speaker.node, None)
        self._note_gone([speaker.node], Reason.DEPARTED, now)
        self.operate(speaker.node, Exit(detail=request.why, ended_with_0=request.ended_with_0), now)
        if request.wants_reply:
            left = standing_without(self.state, speaker.node, self.settings, self._placeholders())
            # When a node in our own process leaves, so do we.
            goes_on = left.goes_on and speaker.node not in self.sessions.local_nodes
            self._reply(speaker, left._replace(goes_on=goes_on))

    def _placeholders(self) -> int:
        """The number of placeholders in the state, cached while no node comes or goes."""
        participants, survivors, _ = self._placeholders_of
        if participants is not self.state.participants or survivors is not self.state.survivors:
            self._placeholders_of = self.state.participants, self.state.survivors, placeholders_in(self.state)
        return self._placeholders_of[2]

    def _on_operation(self, speaker: SessionRecord, request: Operation, now: float) -> None:
        if isinstance(request, _CONCERNS_ALL) and self.is_stranger(speaker):
            # A node that left or was drained may still report its workers' progress: do not end the session for that.
            if not isinstance(request, RecordProgress):
                self._refuse(speaker, now)
            return
        self.operate(speaker.node, request, now)

    def _refuse(self, speaker: SessionRecord, now: float) -> None:
        """Refuse an unauthenticated node's request to end or change the job. A node that waits for a place stays."""
        if not self.state.knows(speaker.node):
            self._ended.append((speaker.number, STRANGER_REFUSED))
            self._end([speaker.number], now, Reason.LOST, STRANGER_REFUSED)
        elif not speaker.refused:
            speaker.refused = True
            what = f"{name_of(self.state, speaker.node)} may not end or change the job: {STRANGER_REFUSED}"
            self.history.add("command", self.state.round, what, now)

    def _on_resume_state(self, speaker: SessionRecord, request: ResumeRequest, now: float) -> None:
        if not request.node_info.address:
            request = request._replace(node_info=request.node_info._replace(address=speaker.address))
        # Do not believe an unauthenticated node's report, unless we await nodes, which can come from anywhere.
        stranger = bool(self._hosts) and self._placeholders_until is None and self.is_stranger(speaker)
        if known := self.state.knows(speaker.node):
            before = self.state
            self._set(without_given_up_join(before, speaker.node, request, self.settings, self.incarnation), now)
            if self.state is not before:
                self._pending.pop(speaker.node, None)
            self._settle(before, now)
            # The node does not know that round.
            self._messages = [message for message in self._messages if message[0] != speaker.number]
        if self._completed_a_round and not stranger:
            self.state = with_later_rounds(self.state, request)
        # Its report to a coordinator with our name might be lost: the node knows us after a single heartbeat.
        elif not stranger and (request.round >= 0 or not (known or request.incarnation == self.incarnation)):
            self._restore_from_node(speaker, request, now)
        if self.state.complete and speaker.node in self.state.participants:
            self._note_host(speaker)
        if self.state.verdict is not None:
            ended_for_all, ended_for = end_notifications(self.state, self.state.verdict)
            self._reply(speaker, ended_for.get(speaker.node, ended_for_all))
        else:
            self._tell_what_was_missed(speaker, request, now)
        self._check_all_reported(now)

    def _tell_what_was_missed(self, speaker: SessionRecord, request: ResumeRequest, now: float) -> None:
        missed = missed_notifications(self.state, speaker.node, request)
        place = self.state.participants.get(speaker.node) if self.state.complete else None
        misses_place = place is not None and self.state.round > request.round and not self.state.is_preempted
        for notification in missed:
            self._reply(speaker, notification)
        if misses_place:
            self._send_placed(speaker, self._all_placements()[speaker.node])
        news = misses_place or bool(missed)
        if request.joining:
            speaker.state = SessionState.IGNORES_JOIN if news else SessionState.WILL_REJOIN
        else:
            speaker.state = SessionState.OPEN
        for extension in self.extensions.loaded:
            extension.on_resume(speaker.node, now)
        if self.state.complete and self.state.succeeded and place is not None:
            self._reply(speaker, nodes_succeeded(self.state))
        if not news and self.state.complete and self.state.wait_list and self._placeholders_until is None:
            self._reply(speaker, nodes_waiting(self.state))

    def _restore_from_node(self, speaker: SessionRecord, request: ResumeRequest, now: float) -> None:
        if self.learns_settings and request.round >= 0 and not self._restored and speaker.settings is not None:
            # A returning node knows the job's settings; the first node might not.
            self.settings = speaker.settings._replace(run_id=self.settings.run_id)
            self._started_with = self.settings
            liveness = self.sessions.liveness
            liveness.lease, liveness.outage_timeout = self.settings.lease, recovery_timeout(self.settings)
        if (sized := with_size_of(self.state, request, self.settings)) is not self.state:
            self._set(sized, now)
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
        restored = self.state
        for node in list(self._pending):
            self._retry_join(node, now)
        self._settle(restored, now)

    def _on_progress_request(self, speaker: SessionRecord, _request: ProgressRequest, now: float) -> None:
        node, view = speaker.node, self.clock_view(now)
        ends_at, reports = self._ends_at(node), self._reports_progress(node)
        ends_in = ends_at - now if ends_at < math.inf else -1.0
        if self._progress is None or self._progress[0] is not self.state:
            self._progress = self.state, progress(self.state, node, self.settings, view)
        common, state = self._progress[1], self.state
        self._reply(speaker, progress_for(common, state, node, self.settings, view, ends_in=ends_in, reports=reports))

    _RECEIVE: dict[type, Callable[[Any, SessionRecord, Any, float], None]] = {  # noqa: RUF012 - a table, never changed
        JoinRequest: _on_join,
        NextStore: _on_next_store,
        LeaveRequest: _on_leave,
        **dict.fromkeys(get_args(NodeOperation), _on_operation),
        ResumeRequest: _on_resume_state,
        ProgressRequest: _on_progress_request,
    }

    # End of sessions

    def _end(self, sessions: Iterable[int], now: float, reason: Reason, detail: str = "") -> None:
        gone = [node for number in sessions if (node := self.sessions.close(number)) is not None]
        for node in gone:
            self._pending.pop(node, None)
            for extension in self.extensions.loaded:
                extension.forget(node, now)
        self._remove_lost(gone, now, reason, detail)

    def _release_session(self, session: int, now: float) -> None:
        """Release a session (law 5): a running round's node might well continue. Others will repeat their requests."""
        speaker = self.sessions.get(session)
        if speaker is not None and self.state.complete and speaker.node in self.state.participants:
            self.sessions.close(session)
            self._pending.pop(speaker.node, None)
            self._all_released = True
        else:
            self._end([session], now, Reason.LOST, _SILENCE_DETAIL.format(recovery_timeout(self.settings)))

    def _await_released(self, now: float) -> None:
        """Give other nodes whose sessions were released with a returned node's session time to return too."""
        self._all_released = False
        self._placeholders_until = now + recovery_timeout(self.settings)

    # Running operations

    def operate(self, node: NodeId, operation: Operation, now: float) -> None:
        """Run a node's or an operator's operation, and all that follows from it."""
        before = self.state
        self._run(node, operation, now)
        self._settle(before, now)

    def _wait(self, node: NodeId, join: Join) -> None:
        """Let a node wait with this join, which replaces any earlier join."""
        self._pending[node] = join
        if join.deadline < math.inf:
            heapq.heappush(self._deadlines, (join.deadline, node))

    def _next_deadline(self) -> float:
        """The earliest deadline of a waiting join; infinity if none waits."""
        while self._deadlines:
            deadline, node = self._deadlines[0]
            join = self._pending.get(node)
            if join is not None and join.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return math.inf

    def _continue_join(self, node: NodeId, now: float) -> None:
        before = self.state
        self._retry_join(node, now)
        self._settle(before, now)

    def _retry_join(self, node: NodeId, now: float) -> None:
        """Continue a waiting join as far as possible now."""
        join = self._pending.get(node)
        if join is None:
            return
        before = self.state
        end = self._run(node, join, now)
        if end is NoChange.WAIT:
            return
        if end is Refusal.TIMEOUT and node in before.participants and not before.complete:
            self.history.nodes_gone([name_of(before, node)], 0, Reason.GAVE_UP, before.round, now)
        self._pending.pop(node, None)
        if isinstance(end, Refusal):
            view = self.clock_view(now)
            self.send_to([node], join_refusal(end, join, node, before, self.state, self.settings, view))

    def _run(self, node: NodeId, operation: Operation, now: float) -> NoChange | Refusal:
        """Take steps until the operation ends or must wait."""
        while True:
            before = self.state
            after = step(operation, before, node, self.clock_view(now), self.settings)
            if not isinstance(after, State):
                return after
            if isinstance(operation, Join) and node in before.redundancy_list:
                join, operation = operation, renewed(operation, before, after, node, now, self.settings)
                if operation is not join:
                    self._wait(node, operation)
            self._set(after, now)

    def _set(self, state: State, now: float) -> None:
        self.state = state
        self._observer.observe(state, now)
        if state.size is not None:  # an operator changed the number of nodes
            self.settings = self.settings._replace(**state.size._asdict())

    def _remove_lost(self, nodes: Iterable[NodeId], now: float, reason: Reason, detail: str = "") -> None:
        """Remove these nodes in one change. Otherwise a round might be completed with a node that is removed next."""
        before, nodes = self.state, list(nodes)
        self._note_gone(nodes, reason, now)
        waiting: list[NodeId] = []
        for node in nodes:
            state = self.state
            ends_round = node in state.participants and (not state.is_preempted or node in state.succeeded)
            if state.complete and ends_round:
                self._remove_waiting(waiting, reason, now)
                waiting = []
                self._run(node, Exit(reason, detail), now)
            elif state.knows(node):
                waiting.append(node)
        self._remove_waiting(waiting, reason, now)
        self._settle(before, now)

    def _note_gone(self, nodes: Sequence[NodeId], reason: Reason, now: float) -> None:
        """Record nodes that are about to be removed and that no other event names. The first node of a running round to
        be removed ends the round, and the end of the round names it."""
        state = self.state
        if state.closed:
            return
        members = (node for node in nodes if node in state.participants or node in state.survivors)
        gone = [node for node in members if node not in state.succeeded]
        if state.complete and not state.is_preempted:
            gone = gone[1:]
        names = [name_of(state, node) for node in gone[:_MOST_GONE]]
        self.history.nodes_gone(names, len(gone) - len(names), reason, state.round, now)

    def _remove_waiting(self, nodes: list[NodeId], reason: Reason, now: float) -> None:
        if nodes:
            from rallypoint.control.membership.many_gone import without_nodes

            self._set(without_nodes(self.state, nodes, reason, self.settings), now)

    # Transitions between states

    def _settle(self, before: State, now: float) -> None:
        """Notify the nodes that a change affects, and check all joins that it might affect."""
        while before is not self.state:
            after = self.state
            rejoining = self._kept_places(before, after) if before.complete and not after.complete else {}
            self._notify(before, after, keeps_places=bool(rejoining))
            self.history.record(before, after, now)
            self.extensions.on_change(before, after, now)
            self._tell_waiting(now)
            self._tell_succeeded(now)
            unblocked = self._unblocked(before, after)
            before = after
            for node in unblocked:
                self._retry_join(node, now)
            if rejoining:
                self._run(next(iter(rejoining)), Rejoin(rejoining), now)

    def _kept_places(self, before: State, after: State) -> Mapping[NodeId, NodeInfo]:
        """Return the node infos of an ended round's nodes for the next round if law 7 applies; otherwise nothing."""
        ended, end = before.participants, after.ended
        if after.closed or self._next_store.round != before.round:
            return {}
        if end is None or end.reason is not Reason.FAILURE or not end.restarts_workers:
            return {}
        some_go = before.preempted is not None or before.finished or len(after.survivors) != len(ended)
        segments = self.settings.segment > 1  # then others can join, but earlier nodes have the places
        places = len(after.survivors) + (0 if segments else len(after.wait_list))
        # A round that is not complete at once might lose its host. Then another node needs a listening store.
        if some_go or after.restart_delay or not self.settings.min_nodes <= places <= self.settings.max_nodes:
            return {}
        if any(node not in self._pending for node in (*after.wait_list, *(after.redundancy_list if segments else ()))):
            return {}  # the round would wait for that node's join, and no other join would complete it
        if any((session := self.sessions.find(node)) is None or not session.keeps_place for node in ended):
            return {}
        infos = {node: participant.node_info for node, participant in ended.items()}
        host = next(node for node, participant in ended.items() if participant.rank == 0)
        return infos | {host: infos[host]._replace(store_port=self._next_store.store_port, restarts_workers=True)}

    def _unblocked(self, before: State, after: State) -> list[NodeId]:
        """Nodes whose waiting joins might be able to continue.

        When a node arrives in a forming round, the waiting nodes are checked only if it was the last one missing. So a
        rendezvous of n nodes takes n checks instead of n squared.
        """
        settled_before, settled_now = is_settled(before, self.settings), is_settled(after, self.settings)
        if _all_joins_depend_on(before) != _all_joins_depend_on(after) or (settled_before and not settled_now):
            return list(self._pending)
        nodes = self._unblocked_spares(before, after)
        if settled_now and not settled_before:  # any node's join completes the round for all, if it can be complete now
            nodes += islice((node for node in after.participants if node in self._pending), 1)
        return nodes

    def _unblocked_spares(self, before: State, after: State) -> list[NodeId]:
        """Spares that might get a place now."""
        if self.settings.segment > 1:  # then a spare waits for other nodes of its domain, until one of these goes
            return list(self._pending) if len(after.wait_list) < len(before.wait_list) else []
        if not after.redundancy_list or _places(after) >= _places(before):
            return []
        free = max(0, self.settings.max_nodes - _places(after))
        return list(islice((node for node in after.redundancy_list if node in self._pending), free))

    def _notify(self, before: State, after: State, *, keeps_places: bool = False) -> None:
        if after.verdict is not None and before.verdict is None:
            self._pending.clear()
            for_all, for_some = end_notifications(after, after.verdict)
            self._messages += [(session.number, for_some.get(session.node, for_all)) for session in self.sessions]
            return
        for nodes, notification in notification_diff(before, after, keeps_places=keeps_places):
            # Do not notify a node that leaves in this change.
            concerned = [node for node in nodes if after.knows(node) or node not in before.participants]
            self.send_to(concerned, notification)
        if newly_complete(before, after):
            self._place_all()

    def _tells_waiting_at(self) -> float:
        """When to notify the running round of the number of waiting nodes; infinity if it has not changed."""
        state, (round_, last_told) = self.state, self._told_waiting
        is_told = round_ == state.round
        if not state.complete or state.verdict is not None or self._placeholders_until is not None:
            return math.inf
        if len(state.wait_list) == (len(last_told) if is_told else 0):
            return math.inf
        return self._told_waiting_at + _WAITING_EVERY if is_told and state.wait_list else -math.inf

    def _tell_waiting(self, now: float) -> None:
        """Notify the running round of the number of waiting nodes, unless it is too early: many may arrive in turn."""
        if now < self._tells_waiting_at():
            return
        state, (round_, last_told) = self.state, self._told_waiting
        self.history.nodes_waiting(last_told if round_ == state.round else (), state, now)
        self._told_waiting, self._told_waiting_at = (state.round, state.wait_list), now
        self.send_to(state.participants, nodes_waiting(state))

    def _tell_succeeded(self, now: float) -> None:
        """Notify the running round of nodes that succeeded, if that is due and others are still working."""
        state, last_told = self.state, self._told_succeeded
        if not state.succeeded or state.succeeded is last_told or not state.complete or state.verdict is not None:
            self._tells_succeeded_at = math.inf
            return
        here = [node for node in self.sessions.local_nodes if node in state.succeeded]
        if any(node not in last_told or node in state.finished for node in here):  # the coordinator goes with them
            self._tells_succeeded_at = now
        elif self._tells_succeeded_at == math.inf:
            self._tells_succeeded_at = now + _SUCCEEDED_AFTER + len(state.participants) * _SUCCEEDED_AFTER_NODE
        if now >= self._tells_succeeded_at:
            self._told_succeeded, self._tells_succeeded_at = state.succeeded, math.inf
            self.send_to(state.participants, nodes_succeeded(state))

    def send(self, session: int, message: Any) -> None:
        """Send a message in this session."""
        self._messages.append((session, message))

    def send_to(self, nodes: Iterable[NodeId], notification: Notification) -> None:
        """Send to each node that has a session. A node without one asks when it is back."""
        for node in nodes:
            if (session := self.sessions.find(node)) is not None:
                self._messages.append((session.number, notification))

    def _reply(self, speaker: SessionRecord, notification: Notification) -> None:
        # Many returning nodes get the same reply, such as a long traceback: reuse one object, which is encoded once.
        last = self._last_reply
        if notification != last:
            last = self._last_reply = notification
        self._messages.append((speaker.number, last))

    def _place_all(self) -> None:
        """Send all placements of a complete round."""
        self._completed_a_round = True
        self._hosts_round, self._hosts = self.state.round, set()
        for node, placement in self._all_placements().items():
            self._pending.pop(node, None)
            if (speaker := self.sessions.find(node)) is None:
                continue
            self._hosts.add(speaker.observed_address)
            if speaker.state is SessionState.WILL_REJOIN:  # its earlier join got the place
                speaker.state = SessionState.IGNORES_JOIN
            self._send_placed(speaker, placement)

    def _send_placed(self, speaker: SessionRecord, placement: Placement) -> None:
        """Send a placement. First send the allowed peers if the node hosts the round's store."""
        if placement.group_rank == 0:
            self._notify_peers(speaker)
        self._messages.append((speaker.number, Placed(placement)))

    def _all_placements(self) -> dict[NodeId, Placement]:
        """Placements of the running round, in order of rank, cached while they stay the same."""
        state, places, control_rank = self.state, self.state.participants, -1
        for node in self.sessions.local_nodes:
            control_rank = places[node].rank if node in places else control_rank
        host, origin = self.sessions.own_external_address, state.origin or self.incarnation
        follows_from = (places, state.finished, state.progress, state.size, state.max_restarts, control_rank, host)
        known, current = self._placements
        # Compare by identity where comparing values would be slow for a large job.
        if known[2:] != follows_from[2:] or known[0] is not places or known[1] is not state.finished:
            current = placements(state, origin, control_rank, host)
            self._placements = follows_from, current
        return current

    def _notify_peers(self, host: SessionRecord) -> None:
        """Send the workers' addresses to the host of the round's store, if the nodes reported them."""
        if any(session.addresses is not None for session in self.sessions):
            from rallypoint.control.coordinator.store_peers import peers_notification

            for notification in peers_notification(self.state, self.sessions):
                self._messages.append((host.number, notification))

    def _other_job(self, speaker: SessionRecord, node_info: NodeInfo, now: float) -> str:
        """Describe this job if a node that joins for the first time certainly belongs to another one: both have the
        default id, and the node was started with another program or number of nodes, or on the machine of the job's
        only node. Empty if the node might belong to this job."""
        state = self.state
        if state.is_initial or state.knows(speaker.node):
            return ""
        twin = self.settings.max_nodes == 1 and any(
            session.node.host == speaker.node.host for session in self.sessions if state.knows(session.node)
        )
        own, job = speaker.settings, self._started_with
        other_size = own is not None and (own.min_nodes, own.max_nodes) != (job.min_nodes, job.max_nodes)
        programs = {state.programs.get(node_info.role, ""), node_info.program} - {""}
        if not (twin or other_size or len(programs) > 1):
            return ""
        program = state.programs.get(node_info.role, "") or next(iter(state.programs.values()), "")
        age = 0.0 if self.history.began is None else now - self.history.began
        return f"since {age:.0f} s{f': {program}' if program else ''}"

    def _report_differences(self, speaker: SessionRecord, node_info: NodeInfo) -> None:
        """Notify a node, once, that it was started with other settings than the job."""
        own, job, state = speaker.settings, self._started_with, self.state
        if state.is_initial:
            state = State()
        if len(speaker.differences_reported) >= _MAX_DIFFERENCES:
            return
        alike = bool(job.restart_window) or state.max_restarts in (-1, node_info.max_restarts)
        if alike and own in (None, job) and state.programs.get(node_info.role, node_info.program) == node_info.program:
            return
        from rallypoint.control.coordinator.differences import differences

        unreported = tuple(
            difference
            for difference in differences(node_info, own, state, job)
            if difference not in speaker.differences_reported
        )
        if unreported:
            speaker.differences_reported += unreported
            self._reply(speaker, ConfigDiffers(name_of(state, speaker.node), unreported))

    # Nodes without proof (`control.coordinator.connection`)

    def _note_host(self, speaker: SessionRecord) -> None:
        """Record the address of a node in the running round."""
        if self._hosts_round != self.state.round:
            self._hosts_round, self._hosts = self.state.round, set()
        self._hosts.add(speaker.observed_address)

    def is_stranger(self, speaker: SessionRecord) -> bool:
        """Whether nothing shows that a node belongs to the job: it proved nothing, and its machine hosts no node of the
        current or last round. Before the first round, having a place shows it."""
        if speaker.trusted:
            return False
        return speaker.observed_address not in self._hosts if self._hosts else not self.state.knows(speaker.node)

    # Known nodes that have not reported yet

    def _unreported(self) -> Iterator[NodeId]:
        return (node for node in known_to(self.state) if node not in self.sessions)

    def _any_unreported(self) -> bool:
        """Whether any known node has not reported. Searches again only when all nodes found earlier have reported."""
        candidates = self._maybe_unreported
        while candidates and (candidates[-1] in self.sessions or not self.state.knows(candidates[-1])):
            candidates.pop()
        if not candidates:
            candidates.extend(reversed(list(self._unreported())))
        return bool(candidates)

    def _awaits_participants(self) -> bool:
        """Whether a participant of a forming round has not reported. Such a participant is the last candidate.

        On etcd:

            1. A round forms. Node B, which coordinates, gives up or dies. Its last state lists B as a participant.
            2. A is elected, reads that state, and awaits B.
            3. If the round were completed with B, all workers would start, wait for B's workers, and be restarted after
               B's deadline.
        """
        return (
            not self.state.complete and self._any_unreported() and self._maybe_unreported[-1] in self.state.participants
        )

    def _check_all_reported(self, now: float) -> None:
        if self._placeholders_until is not None and not self._any_unreported():
            self._all_reported(now)

    def _all_reported(self, now: float) -> None:
        """Stop awaiting the nodes that were in the job when this coordinator was filled."""
        self._placeholders_until = None
        self._tell_waiting(now)
        if not self.state.complete:  # a round might have waited only for these; any join completes it
            for node in islice((node for node in self.state.participants if node in self._pending), 1):
                self._continue_join(node, now)

    # Effects of time

    def clock_view(self, now: float) -> ClockView:
        view = self._observer.clock_view(now)
        if self._placeholders_until is None or not self._awaits_participants():
            return view
        return view._replace(awaits_until=self._placeholders_until)

    def _waits_for_time(self) -> bool:
        """Whether the forming round might become complete just because time passes."""
        state = self.state
        if state.complete or not state.participants or state.closed:
            return False
        return bool(state.restart_delay) or (bool(state.last_call) and last_call_decides(state))

    def _completion_times(self) -> list[float]:
        """When it might, on our clock: at the end of the last call and of the restart delay."""
        view = self._observer.clock_view(0.0)
        moments = [backoff_ends(self.state, view)] if self.state.restart_delay else []
        if view.last_call_at is not None and last_call_decides(self.state):
            moments.append(view.last_call_at + self.settings.last_call_timeout)
        return moments

    def _ends_at(self, node: NodeId) -> float:
        """When a node stops waiting: at its own deadline, or, if all nodes are needed, at the earliest one."""
        own = self._pending.get(node)
        if own is None or node in self.state.redundancy_list:
            return math.inf
        if not needs_all(self.state, self.settings):
            return own.deadline
        return min(own.deadline, self._next_deadline())

    def _reports_progress(self, node: NodeId) -> bool:
        """Whether a node logs the progress: among nodes that wait alike, the one in this process, or the first one."""
        alike = nodes_waiting_alike(self.state, node)
        return node == next(
            (local for local in self.sessions.nodes_in_this_process if local in alike), next(iter(alike))
        )


def _all_joins_depend_on(state: State) -> tuple[object, ...]:
    """Values whose change can let any waiting join continue or end."""
    return state.round, state.complete, state.closed, state.abandoned.number, state.size


def _places(state: State) -> int:
    """The number of occupied places."""
    return len(state.participants) + len(state.wait_list) + len(state.survivors)
