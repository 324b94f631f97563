"""What a node holds of its job, so that it can say it again when its link was lost and is open once more. Pure.

The link's shell hands every request and every notification through here, and sends `requests_to_repeat` when a session
opens.

Laws:

1. What was asked and not yet answered is asked again; the coordinator takes what it has heard before for what it is.
   But a join is not asked of another coordinator: what it brings along may have been used in a place that the first
   gave. A spare waits for as long as it takes.
2. The name and the incarnation of a session hold good once the coordinator has said anything in it: only then has it
   surely heard what was said at its beginning. A name that was claimed from the coordinator that gave it stays.
   Who waits for its first place claims from each coordinator the name that this one gave: one may come back that was
   thought to be gone, if those after it have written nothing down.
3. Nothing is said again after the job's end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rallypoint.membership.operations import Close, Fail, NodeOperation, PreemptJob, Succeed
from rallypoint.membership.state import NodeId, NodeInfo, NodeRange
from rallypoint.protocol.messages import (
    Heartbeat,
    JobEnded,
    JoinRefused,
    JoinRequest,
    LeaveRequest,
    LinkDown,
    LinkLost,
    LinkUp,
    Notification,
    Placed,
    Placement,
    Preempted,
    Progress,
    ProgressRequest,
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.protocol.operator_messages import CollectedPart, HangReport, NodeReport, OperatorAction

_MAX_IDENTITIES = 8
"""Of how many coordinators a node that waits knows what they called it."""


class ResumeState(NamedTuple):
    """A node's place, what it has asked, and who it is there.

    `join` is the join that has no answer yet and the moment until which it may wait, `is_spare` whether the node has
    been told that it waits as a spare, `refused` whether its last join came to nothing; `repeated_requests` what was
    said of the round that runs. `last_ended_round` is the newest round that it knows to be over. `last_identity` is
    incarnation and name of the last session that was answered in, `offered_identity` of one that was not yet.
    `identities` are those of all sessions since the node last had a place, the last for each coordinator.
    """

    last_identity: tuple[str, NodeId] | None = None
    offered_identity: tuple[str, NodeId] | None = None
    identities: tuple[tuple[str, NodeId], ...] = ()
    node_info: NodeInfo | None = None
    placement: Placement | None = None
    round_over: bool = True
    last_ended_round: int = -1
    failures: int = 0
    refused: bool = False
    join: tuple[JoinRequest, float] | None = None
    is_spare: bool = False
    repeated_requests: tuple[NodeOperation, ...] = ()
    ended: bool = False
    size: NodeRange | None = None
    """How many nodes rounds have, where an operator has changed that."""

    @property
    def needs_coordinator(self) -> bool:
        """Whether the node can do nothing more without the control plane."""
        return self.join is not None or any(isinstance(each, Fail | Succeed) for each in self.repeated_requests)


def after_request(held: ResumeState, request: Request, now: float) -> ResumeState:
    """What is held once the node has said `request`, at `now` seconds on its own clock."""
    match request:
        case JoinRequest(node_info=node_info, timeout=timeout):
            join = (request, now + timeout)
            return held._replace(
                node_info=node_info, join=join, is_spare=False, repeated_requests=(), ended=False, refused=False
            )
        case LeaveRequest():
            return held._replace(placement=None, round_over=True, join=None, repeated_requests=())
        case Heartbeat() | ProgressRequest() | ResumeRequest() | NodeReport() | CollectedPart() | HangReport():
            return held
        case operation:
            return held._replace(repeated_requests=_with(held.repeated_requests, operation))


def _with(requests: tuple[NodeOperation, ...], request: NodeOperation) -> tuple[NodeOperation, ...]:
    """The requests, with this one in the place of another of its kind."""
    return (*(each for each in requests if type(each) is not type(request)), request)


def after_notification(held: ResumeState, notification: Notification) -> ResumeState:
    """What is held once the node has been told `notification`."""
    if not isinstance(notification, LinkDown | LinkUp | LinkLost) and held.offered_identity is not None:
        held = held._replace(last_identity=held.offered_identity, offered_identity=None)
    match notification:
        case Placed(placement=placement):
            failures = max(held.failures, placement.restarts)
            return held._replace(
                placement=placement,
                identities=(),
                round_over=False,
                failures=failures,
                join=None,
                repeated_requests=(),
                size=placement.size or held.size,
            )
        case Preempted(node=who, seconds=seconds, whole_job=True, why=why):
            # Said by all, it outlives the one who was first to say it.
            return held._replace(repeated_requests=_with(held.repeated_requests, PreemptJob(seconds, why, who)))
        case OperatorAction(size=NodeRange() as size):
            return held._replace(size=size)
        case RoundEnded(end=end) if held.placement is None or end.round >= held.placement.round:
            failures = held.failures
            if held.placement is not None and end.cause is not None:
                failures = max(failures, held.placement.restarts + 1)
            news, held = (
                end.round > held.last_ended_round,
                held._replace(last_ended_round=max(held.last_ended_round, end.round), failures=failures),
            )
            if held.placement is None or end.round > held.placement.round:
                # A round of ours came and went unseen; what the join brought along was used up in it.
                return held._replace(join=None) if news else held
            return held._replace(round_over=True, repeated_requests=_outside_rounds(held))
        case Progress(spare=spare):
            return held._replace(is_spare=spare)
        case JoinRefused():
            return held._replace(join=None, refused=True)
        case JobEnded():
            return held._replace(join=None, repeated_requests=(), ended=True)
        case _:
            return held


def without_foreign_join(held: ResumeState, incarnation: str) -> ResumeState:
    """What is held of a join when a session opens with the coordinator `incarnation`: nothing if another was asked."""
    return held if last_incarnation(held) in ("", incarnation) else held._replace(join=None)


def session_opened(held: ResumeState, incarnation: str, node: NodeId) -> ResumeState:
    """What is held once a session is open in which the node is called `node`, unless it claims an earlier name."""
    claimed = _claimed_identity(held, incarnation)
    identity = claimed if claimed is not None and claimed[0] == incarnation else (incarnation, node)
    others = tuple(each for each in held.identities if each[0] != incarnation)
    known = () if held.placement is not None else (*others[1 - _MAX_IDENTITIES :], identity)
    return held._replace(offered_identity=identity, identities=known)


def requests_to_repeat(held: ResumeState, now: float, incarnation: str) -> list[Request]:
    """What to say at the beginning of a session with this coordinator, before anything else and `session_opened`.

    In the first session that is only what waits.
    """
    if held.ended:
        return []
    again: list[Request] = []
    claimed = _claimed_identity(held, incarnation)
    if claimed is not None and held.node_info is not None:
        again.append(_resume_request(held, held.node_info, *claimed))
    again += held.repeated_requests
    if held.join is not None:
        request, until = held.join
        if until < math.inf and not held.is_spare:
            left = max(0.0, until - now)
            request = request._replace(timeout=left, waited=request.waited + request.timeout - left)
        again.append(request)
    return again


def give_up_at(held: ResumeState, since: float, timeout: float) -> float:
    """Until when a node waits for a control plane that it has needed and been without from `since` on, for `timeout`
    seconds at most; infinity if it can do without. A join has one deadline, whoever decides on it.
    """
    if not held.needs_coordinator:
        return math.inf
    if held.join is None or held.is_spare:
        return since + timeout
    return min(since + timeout, held.join[1])


def last_incarnation(held: ResumeState) -> str:
    """The coordinator of the last session, by its incarnation; empty if there was none."""
    last = held.offered_identity or held.last_identity
    return "" if last is None else last[0]


def _claimed_identity(held: ResumeState, incarnation: str) -> tuple[str, NodeId] | None:
    """The name that a session with this coordinator begins with, and who gave it."""
    if held.node_info is None or held.ended:
        return None
    if held.placement is not None:
        return held.last_identity
    # Without a place nothing depends on what the coordinator has heard, so the last name is the one that it may still
    # know.
    given = next((each for each in held.identities if each[0] == incarnation), None)
    return given or held.offered_identity or held.last_identity


def _resume_request(held: ResumeState, node_info: NodeInfo, incarnation: str, node: NodeId) -> ResumeRequest:
    place = held.placement
    joining = held.join is not None
    if place is None:
        last = held.last_ended_round
        return ResumeRequest(incarnation, node, node_info, last_ended_round=last, joining=joining, size=held.size)
    return ResumeRequest(
        incarnation,
        node,
        node_info._replace(max_restarts=place.max_restarts),
        round=place.round,
        origin=place.origin,
        group_rank=place.group_rank,
        group_world_size=place.group_world_size,
        control_rank=place.control_rank,
        failures=held.failures,
        round_over=held.round_over,
        last_ended_round=held.last_ended_round,
        joining=joining,
        size=held.size,
    )


def _outside_rounds(held: ResumeState) -> tuple[NodeOperation, ...]:
    return tuple(each for each in held.repeated_requests if isinstance(each, Close | PreemptJob))
