"""The state of the job that a node keeps and sends again when a lost link is open again. Pure.

The link's shell passes every request and notification to this module, and sends `requests_to_repeat` when a session
opens.

Laws:

1. Requests without an answer are sent again; the coordinator recognizes repeated ones. A join, however, is not sent to
   another coordinator, because the first one might have used its data for a place. Nor is the next store's port, for
   the same reason. A spare waits as long as it takes.
2. A coordinator counts as met once it sends anything in a session: only then has it certainly received the requests
   sent at the session's start.
3. Nothing is sent again after the end of the job.
4. A node that knows that all nodes of its round succeeded, itself included, needs no coordinator. If the coordinator's
   host succeeded, another coordinator appears soon or never.
5. A leaving node tells each coordinator that it meets, until the node is gone. Otherwise:

     1. The coordinator dies, and B receives SIGTERM: nobody can receive B's leave.
     2. While B's workers take their time to end, the next coordinator meets B as a node of the round.
     3. Only when B's process ends does B count as lost, and the other nodes have waited until then.
6. A node that keeps its place when a round ends has joined: its last join applies again, with the store port that it
   announced.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rallypoint.control.membership.state import (
    Close,
    Fail,
    NodeOperation,
    NodeRange,
    PreemptJob,
    Settings,
    Succeed,
    recovery_timeout,
)
from rallypoint.control.protocol.messages import (
    CauseClues,
    CauseSought,
    CollectedPart,
    Confirmed,
    ConfirmRequest,
    HangReport,
    Heartbeat,
    JobEnded,
    JoinRefused,
    JoinRequest,
    LeaveRequest,
    LinkDown,
    LinkLost,
    LinkUp,
    NextStore,
    NodeReport,
    NodesSucceeded,
    Notification,
    OperatorAction,
    Placed,
    Placement,
    Preempted,
    Progress,
    ProgressRequest,
    Request,
    ResumeRequest,
    RoundEnded,
    Taken,
)

_Repeated = NodeOperation | NextStore | ConfirmRequest
_NEEDS_ANSWER = (Fail, Succeed, ConfirmRequest)
"""After these requests the node waits for the coordinator, without running workers."""


class ResumeState(NamedTuple):
    """A node's place, its unanswered requests, and the coordinator that knows them.

    `last_join` is the newest join; `join` is the same while it has no answer, with its deadline. `is_spare`: the node
    was notified that it waits as a spare. `refused`: its last join failed. `repeated_requests` are the requests about
    the running round. `last_ended_round` is the newest round that the node knows has ended. `met` is the incarnation of
    the last session with an answer, `opened` that of the last session; both are empty at first.
    """

    met: str = ""
    opened: str = ""
    last_join: JoinRequest | None = None
    placement: Placement | None = None
    round_over: bool = True
    last_ended_round: int = -1
    failures: int = 0
    refused: bool = False
    join: tuple[JoinRequest, float] | None = None
    is_spare: bool = False
    repeated_requests: tuple[_Repeated, ...] = ()
    ended: bool = False
    size: NodeRange | None = None
    """The number of nodes of a round, if an operator changed it."""
    leave: LeaveRequest | None = None
    """The last request to leave, if any."""
    succeeded: tuple[tuple[int, int], ...] = ()
    """Nodes of the running round that succeeded, as last notified (`NodesSucceeded`)."""

    @property
    def has_succeeded(self) -> bool:
        """Whether this node's workers succeeded in the running round."""
        return any(isinstance(request, Succeed) for request in self.repeated_requests)

    @property
    def all_succeeded(self) -> bool:
        """Whether all nodes of the running round certainly succeeded (law 4)."""
        place = self.placement
        if place is None or self.round_over or not self.has_succeeded:
            return False
        known = sum(last - first + 1 for first, last in self.succeeded)
        return known + (not self._knows_success_of(place.group_rank)) >= place.group_world_size

    @property
    def host_succeeded(self) -> bool:
        """Whether the coordinator's host succeeded, and so might be gone for good."""
        return (
            self.placement is not None and not self.round_over and self._knows_success_of(self.placement.control_rank)
        )

    def _knows_success_of(self, rank: int) -> bool:
        return any(first <= rank <= last for first, last in self.succeeded)

    @property
    def needs_coordinator(self) -> bool:
        """Whether the node cannot continue without the control plane."""
        return self.join is not None or any(isinstance(request, _NEEDS_ANSWER) for request in self.repeated_requests)


def after_request(state: ResumeState, request: Request, now: float) -> ResumeState:
    """The state after the node sent `request` at `now` seconds on its own clock."""
    match request:
        case JoinRequest():
            return _joined(state, request, now)._replace(repeated_requests=(), ended=False, refused=False, leave=None)
        case LeaveRequest():
            done = tuple(request for request in state.repeated_requests if isinstance(request, Succeed))
            return state._replace(leave=request, join=None, repeated_requests=done)
        case (
            Heartbeat()
            | ProgressRequest()
            | ResumeRequest()
            | NodeReport()
            | CollectedPart()
            | HangReport()
            | Taken()
            | CauseSought()
            | CauseClues()
        ):
            return state
        case operation:
            return state._replace(repeated_requests=_with_request(state.repeated_requests, operation))


def _joined(state: ResumeState, join: JoinRequest, now: float) -> ResumeState:
    return state._replace(last_join=join, join=(join, now + join.timeout), is_spare=False)


def _with_request(requests: tuple[_Repeated, ...], request: _Repeated) -> tuple[_Repeated, ...]:
    """The requests, with this one in place of any other of its kind."""
    return (*(earlier for earlier in requests if type(earlier) is not type(request)), request)


def after_notification(state: ResumeState, notification: Notification, now: float) -> ResumeState:
    """The state after the node received `notification` at `now` seconds on its own clock."""
    if state.met != state.opened and not isinstance(notification, LinkDown | LinkUp | LinkLost):
        state = state._replace(met=state.opened)
    match notification:
        case Placed(placement=placement):
            failures = max(state.failures, placement.restarts)
            return state._replace(
                placement=placement,
                round_over=False,
                failures=failures,
                join=None,
                repeated_requests=(),
                size=placement.size or state.size,
                succeeded=(),
            )
        case NodesSucceeded(round=round_, succeeded=succeeded) if state.placement and state.placement.round == round_:
            return state._replace(succeeded=succeeded)
        case Preempted(node=who, seconds=seconds, whole_job=True, why=why):
            # All nodes repeat the notice, so it outlives the first sender.
            return state._replace(
                repeated_requests=_with_request(state.repeated_requests, PreemptJob(seconds, why, who))
            )
        case OperatorAction(size=NodeRange() as size):
            return state._replace(size=size)
        case RoundEnded(end=end) if state.placement is None or end.round >= state.placement.round:
            return _round_ended(state, notification, now)
        case Progress(spare=spare):
            return state._replace(is_spare=spare)
        case JoinRefused():
            return state._replace(join=None, refused=True)
        case Confirmed(number=number):
            confirmed = ConfirmRequest(number)
            others = tuple(request for request in state.repeated_requests if request != confirmed)
            return state._replace(repeated_requests=others)
        case JobEnded():
            return state._replace(join=None, repeated_requests=(), ended=True)
        case _:
            return state


def _round_ended(state: ResumeState, ended: RoundEnded, now: float) -> ResumeState:
    end, place, failures = ended.end, state.placement, state.failures
    if place is not None and end.cause is not None:
        failures = max(failures, place.restarts + 1)
    last = state.last_ended_round
    state = state._replace(last_ended_round=max(last, end.round), failures=failures)
    if place is None or end.round > place.round:
        # This node missed one of its own rounds, which used the join's data.
        return state._replace(join=None) if end.round > last else state
    if ended.keeps_place and state.last_join is not None:
        state = _joined(state, _begun_anew(state.last_join, state.repeated_requests), now)
    return state._replace(round_over=True, repeated_requests=_outside_rounds(state), succeeded=())


def _begun_anew(join: JoinRequest, requests: tuple[_Repeated, ...]) -> JoinRequest:
    """The join of a node that keeps its place, as the coordinator knows it (law 6)."""
    ports = (request.store_port for request in requests if isinstance(request, NextStore))
    node_info = join.node_info._replace(store_port=next(ports, join.node_info.store_port))
    return join._replace(node_info=node_info, timeout=join.timeout + join.waited, waited=0.0)


def without_foreign_join(state: ResumeState, incarnation: str) -> ResumeState:
    """The state for a session with the coordinator `incarnation`, without requests for another one (law 1)."""
    if state.opened in ("", incarnation):
        return state
    others = tuple(request for request in state.repeated_requests if not isinstance(request, NextStore))
    return state._replace(join=None, repeated_requests=others)


def requests_to_repeat(state: ResumeState, now: float) -> list[Request]:
    """The first requests in a session; `opened` is still the previous session's. In the first session, these are only
    the waiting requests."""
    if state.ended:
        return []
    again: list[Request] = []
    if state.opened and state.last_join is not None:
        again.append(_resume_request(state, state.last_join))
    again += state.repeated_requests
    if state.leave is not None:
        again.append(state.leave)
    if state.join is not None:
        request, until = state.join
        if until < math.inf and not state.is_spare:
            left = max(0.0, until - now)
            request = request._replace(timeout=left, waited=request.waited + request.timeout - left)
        again.append(request)
    return again


def give_up_at(state: ResumeState, since: float, settings: Settings) -> float:
    """Until when a node waits for a control plane that it has lacked since `since`, at most the join timeout; infinity
    if it needs none. A join has one deadline for all coordinators."""
    if not state.needs_coordinator:
        return math.inf
    if state.all_succeeded:
        return since
    timeout = settings.join_timeout
    if state.host_succeeded:
        timeout = min(timeout, recovery_timeout(settings))
    if state.join is None or state.is_spare:
        return since + timeout
    return min(since + timeout, state.join[1])


def _resume_request(state: ResumeState, join: JoinRequest) -> ResumeRequest:
    place, incarnation, node_info = state.placement, state.met or state.opened, join.node_info
    joining = state.join is not None
    if place is None:
        last = state.last_ended_round
        return ResumeRequest(incarnation, node_info, last_ended_round=last, joining=joining, size=state.size)
    return ResumeRequest(
        incarnation,
        node_info._replace(max_restarts=place.max_restarts),
        round=place.round,
        origin=place.origin,
        group_rank=place.group_rank,
        group_world_size=place.group_world_size,
        control_rank=place.control_rank,
        failures=state.failures,
        round_over=state.round_over,
        last_ended_round=state.last_ended_round,
        joining=joining,
        size=state.size,
        succeeded=state.succeeded,
    )


def _outside_rounds(state: ResumeState) -> tuple[NodeOperation, ...]:
    return tuple(request for request in state.repeated_requests if isinstance(request, Close | PreemptJob))
