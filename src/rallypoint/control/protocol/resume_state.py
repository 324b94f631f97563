"""The state of its job that a node keeps, to send it again when its link was lost and is open again. Pure.

The link's shell passes every request and every notification through here, and sends `requests_to_repeat` when a session
opens.

Laws:

1. Requests without an answer are sent again; the coordinator recognises those that it has received before. But a join
   is not sent to another coordinator: its data may have been used in a place that the first gave; nor is the port of
   the next store, for the same reason. A spare waits for as long as it takes.
2. A coordinator counts as met once it has sent anything in a session: only then has it certainly received what was
   sent at the beginning of that.
3. Nothing is sent again after the job's end.
4. What has become of a round outlives its coordinator: a node that knows all nodes of its round to have succeeded,
   itself included, needs none. If the node that hosted the coordinator has succeeded, another one comes soon or never.
5. A node that leaves says so to each coordinator that it meets until it is gone. Otherwise

     1. the coordinator dies, and B is sent SIGTERM: its leave has nobody to go to;
     2. B's workers take their time to end, and meanwhile B meets the next coordinator as a node of the round;
     3. only when B's process ends is it missed, as lost, and the others have waited for that.
6. A node that keeps its place when a round ends has joined: its join is the last one that it sent, begun anew, with the
   port of the store that it has told.
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
"""After these the node waits for the coordinator, with no worker that runs."""


class ResumeState(NamedTuple):
    """A node's place, its open requests, and the coordinator that knows them.

    `last_join` is the newest join, and `join` the same while it has no answer, with the moment until which it may wait;
    `is_spare` is whether the node has
    been told that it waits as a spare, `refused` whether its last join failed; `repeated_requests` the requests about
    the running round. `last_ended_round` is the newest round that it knows to be over. `met` is the incarnation of
    the last session with an answer, `opened` that of the last one; both are empty before there was any.
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
    """The number of nodes of a round, if an operator has changed it."""
    leave: LeaveRequest | None = None
    """The last request to leave, once there was one."""
    succeeded: tuple[tuple[int, int], ...] = ()
    """The nodes of the running round that have succeeded, as far as this node was told (`NodesSucceeded`)."""

    @property
    def has_succeeded(self) -> bool:
        """Whether this node's workers have, in the running round."""
        return any(isinstance(request, Succeed) for request in self.repeated_requests)

    @property
    def all_succeeded(self) -> bool:
        """Whether all nodes of the running round certainly have (law 4)."""
        place = self.placement
        if place is None or self.round_over or not self.has_succeeded:
            return False
        known = sum(last - first + 1 for first, last in self.succeeded)
        return known + (not self._knows_success_of(place.group_rank)) >= place.group_world_size

    @property
    def host_succeeded(self) -> bool:
        """Whether the node whose agent hosted the coordinator has, so that it may be gone for good."""
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
    """The state after the node has sent `request`, at `now` seconds on its own clock."""
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
    """The requests, with this one in place of another of its kind."""
    return (*(earlier for earlier in requests if type(earlier) is not type(request)), request)


def after_notification(state: ResumeState, notification: Notification, now: float) -> ResumeState:
    """The state after the node has received `notification`, at `now` seconds on its own clock."""
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
            # Sent by all nodes, it outlives the first one that has sent it.
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
        # A round of ours was missed; the data of the join was used up in it.
        return state._replace(join=None) if end.round > last else state
    if ended.keeps_place and state.last_join is not None:
        state = _joined(state, _begun_anew(state.last_join, state.repeated_requests), now)
    return state._replace(round_over=True, repeated_requests=_outside_rounds(state), succeeded=())


def _begun_anew(join: JoinRequest, requests: tuple[_Repeated, ...]) -> JoinRequest:
    """The join of a node that keeps its place, as the coordinator has it (law 6)."""
    ports = (request.store_port for request in requests if isinstance(request, NextStore))
    node_info = join.node_info._replace(store_port=next(ports, join.node_info.store_port))
    return join._replace(node_info=node_info, timeout=join.timeout + join.waited, waited=0.0)


def without_foreign_join(state: ResumeState, incarnation: str) -> ResumeState:
    """The state for a session with the coordinator `incarnation`: without what only another one may use (law 1)."""
    if state.opened in ("", incarnation):
        return state
    others = tuple(request for request in state.repeated_requests if not isinstance(request, NextStore))
    return state._replace(join=None, repeated_requests=others)


def requests_to_repeat(state: ResumeState, now: float) -> list[Request]:
    """The requests at the beginning of a session, before anything else; `opened` is still that of the session before.
    In the first session these are only the waiting ones.
    """
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
    """The time until which a node waits for a control plane that it has needed and lacked since `since`, for at most
    the join timeout; infinity if it needs none. A join has one deadline, whichever coordinator decides on it.
    """
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
