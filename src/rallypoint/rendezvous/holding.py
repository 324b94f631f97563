"""What a node holds of its job, so that it can say it again when its link was lost and is open once more. Pure.

The link's shell hands every request and every notice through here, and sends `said_again` when a session opens.

Laws:

1. What was asked and not yet answered is asked again; the arbiter takes what it has heard before for what it is.
   But a join is not asked of another arbiter: what it brings along may have been used in a place that the first gave.
   A spare waits for as long as it takes.
2. The name and the incarnation of a session hold good once the arbiter has said anything in it: only then has it
   surely heard what was said at its beginning. A name that was claimed from the arbiter that gave it stays.
3. Nothing is said again after the job's end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rallypoint.rendezvous.messages import (
    Beat,
    Holding,
    Inquire,
    JobEnded,
    JoinRefused,
    JoinRequest,
    Leave,
    LinkDown,
    LinkLost,
    LinkUp,
    Notice,
    Placed,
    Placement,
    Progress,
    Request,
    RoundEnded,
)
from rallypoint.rendezvous.operations import Close, Drain, Fail, Preempt, Succeed
from rallypoint.rendezvous.state import Member, NodeId


class Held(NamedTuple):
    """A node's place, what it has asked, and who it is there.

    `join` is the join that has no answer yet and the moment until which it may wait, `spare` whether the node has been
    told that it waits as a spare, `refused` whether its last join came to nothing; `said` what was told of the round
    that runs. `past` is the newest round that it knows to be over. `known_as` is incarnation and name of the last
    session that was answered in, `greeted_as` of one that was not yet.
    """

    known_as: tuple[str, NodeId] | None = None
    greeted_as: tuple[str, NodeId] | None = None
    member: Member | None = None
    placement: Placement | None = None
    over: bool = True
    past: int = -1
    failures: int = 0
    refused: bool = False
    join: tuple[JoinRequest, float] | None = None
    spare: bool = False
    said: tuple[Fail | Succeed | Drain | Preempt | Close, ...] = ()
    ended: bool = False

    @property
    def waits(self) -> bool:
        """Whether the node can do nothing more without the control plane."""
        return self.join is not None or any(isinstance(each, Fail | Succeed) for each in self.said)


def after_request(held: Held, request: Request, now: float) -> Held:
    """What is held once the node has said `request`, at `now` seconds on its own clock."""
    match request:
        case JoinRequest(member=member, timeout=timeout):
            join = (request, now + timeout)
            return held._replace(member=member, join=join, spare=False, said=(), ended=False, refused=False)
        case Leave():
            return held._replace(placement=None, over=True, join=None, said=())
        case Fail() | Succeed() | Drain() | Preempt() | Close():
            return held._replace(said=(*(each for each in held.said if type(each) is not type(request)), request))
        case Beat() | Inquire() | Holding():
            return held


def after_notice(held: Held, notice: Notice) -> Held:
    """What is held once the node has been told `notice`."""
    if not isinstance(notice, LinkDown | LinkUp | LinkLost) and held.greeted_as is not None:
        held = held._replace(known_as=held.greeted_as, greeted_as=None)
    match notice:
        case Placed(placement=placement):
            failures = max(held.failures, placement.restarts)
            return held._replace(placement=placement, over=False, failures=failures, join=None, said=())
        case RoundEnded(end=end) if held.placement is None or end.round >= held.placement.round:
            failures = held.failures
            if held.placement is not None and end.cause is not None:
                failures = max(failures, held.placement.restarts + 1)
            news, held = end.round > held.past, held._replace(past=max(held.past, end.round), failures=failures)
            if held.placement is None or end.round > held.placement.round:
                # A round of ours came and went unseen; what the join brought along was used up in it.
                return held._replace(join=None) if news else held
            return held._replace(over=True, said=_beyond_rounds(held))
        case Progress(spare=spare):
            return held._replace(spare=spare)
        case JoinRefused():
            return held._replace(join=None, refused=True)
        case JobEnded():
            return held._replace(join=None, said=(), ended=True)
        case _:
            return held


def forget_join(held: Held, incarnation: str) -> Held:
    """What is held of a join when a session opens with the arbiter `incarnation`: nothing if another was asked."""
    last = held.greeted_as or held.known_as
    return held if last is None or last[0] == incarnation else held._replace(join=None)


def greeted(held: Held, incarnation: str, node: NodeId) -> Held:
    """What is held once a session is open in which the node is called `node`, unless it claims an earlier name."""
    claimed = _claimed(held)
    stays = claimed is not None and claimed[0] == incarnation
    return held._replace(greeted_as=claimed if stays else (incarnation, node))


def said_again(held: Held, now: float) -> list[Request]:
    """What to say at the beginning of a session, before anything else and before it is `greeted`.

    In the first session that is only what waits.
    """
    if held.ended:
        return []
    again: list[Request] = []
    claimed = _claimed(held)
    if claimed is not None and held.member is not None:
        again.append(_holding(held, held.member, *claimed))
    again += held.said
    if held.join is not None:
        request, until = held.join
        if until < math.inf and not held.spare:
            left = max(0.0, until - now)
            request = request._replace(timeout=left, waited=request.waited + request.timeout - left)
        again.append(request)
    return again


def _claimed(held: Held) -> tuple[str, NodeId] | None:
    """The name that the next session begins with, and who gave it."""
    if held.member is None or held.ended:
        return None
    # Without a place nothing depends on what the arbiter has heard, so the last name is the one that it may still know.
    return held.known_as if held.placement is not None else held.greeted_as or held.known_as


def _holding(held: Held, member: Member, incarnation: str, node: NodeId) -> Holding:
    place = held.placement
    joining = held.join is not None
    if place is None:
        return Holding(incarnation, node, member, past=held.past, joining=joining)
    return Holding(
        incarnation,
        node,
        member._replace(max_restarts=place.max_restarts),
        round=place.round,
        origin=place.origin,
        group_rank=place.group_rank,
        group_world_size=place.group_world_size,
        control_rank=place.control_rank,
        failures=held.failures,
        over=held.over,
        past=held.past,
        joining=joining,
    )


def _beyond_rounds(held: Held) -> tuple[Close, ...]:
    return tuple(each for each in held.said if isinstance(each, Close))
