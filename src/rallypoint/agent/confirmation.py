"""Confirms that an agent's place in a round is still valid.

An agent that was frozen or cut off might read a `Placed` that is older than the lease. By then the others have counted
its node as lost and continued without it. Laws:

1. The coordinator's answer is as old as the request that it answers. The time at which the agent reads it means
   nothing: a frozen process reads late what arrived early.
2. Workers start only on an answer younger than the lease. A place requested less than a lease ago counts, and so does a
   heartbeat's answer. Otherwise the agent asks the coordinator, whose answer follows all its earlier messages to this
   node.
3. Nothing starts until the coordinator answers or ends the round. The link repeats the request in each session, and
   gives up as it does for a join (`control.protocol.resume_state`).
4. With `--fence`, workers run only on an answer younger than the lease. While they run, the agent asks four times per
   lease, and each answer postpones the time at which the reaper kills them. The reaper stores this time, so it acts
   even if the agent is frozen. An elected coordinator's answer expires with its own lease in etcd:

     1. A coordinates, and its node runs workers. A is cut off from etcd, but not from its own node.
     2. A's lease ends and B is elected. A third of a lease later B counts A's node as lost: the next round begins.
     3. A still answers its own node. If each answer were valid for a full lease, the workers there would run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rallypoint.agent.steps import Event
from rallypoint.base.clock import BOOT_CLOCK, Clock
from rallypoint.base.light_typing import Protocol
from rallypoint.base.log import get_logger
from rallypoint.control.protocol.messages import Confirmed, ConfirmRequest, LinkDown, LinkUp, Request

log = get_logger(__name__)

_ASKED_PER_LEASE = 4
"""Requests per lease while fenced workers run: if one is lost or late, three are left."""


class ConfirmingClient(Protocol):
    """The part of a `RendezvousClient` that `Confirmation` uses."""

    @property
    def lease(self) -> float:
        """See `RendezvousClient.lease`."""

    @property
    def confirmed_at(self) -> float:
        """See `RendezvousClient.confirmed_at`."""

    def send(self, request: Request) -> None:
        """Send a request."""


class Confirmation:
    """Asks the coordinator if its last answer is too old.

    Args:
        rendezvous: sends requests to the coordinator.
        clock: a clock that counts while the machine is suspended.
        fence: called with the time, on that clock, at which to kill the workers; None without `--fence`.
    """

    def __init__(
        self, rendezvous: ConfirmingClient, clock: Clock = BOOT_CLOCK, fence: Callable[[float], None] | None = None
    ) -> None:
        self._rendezvous = rendezvous
        self._clock = clock
        self._fence = fence
        self._until = clock.monotonic() + rendezvous.lease
        """When the coordinator's last answer expires: until then the others count on this node."""
        self._sent: dict[int, float] = {}
        """When each unanswered request younger than the lease was sent, by number."""
        self._number = 0
        """The number of the last request."""
        self._ask_at = math.inf
        """When to ask next; infinity while no fenced workers run."""
        self.awaited = False
        """Whether workers that are due to start are waiting for an answer; false once their round ends."""
        self._link_down = False

    def requests_place(self) -> None:
        """Note that this node is about to request a place: the answer will be younger than this moment."""
        self._until, self.awaited = self._clock.monotonic() + self._rendezvous.lease, False

    def must_wait(self) -> bool:
        """Decide whether workers must wait until the coordinator confirms the round; ask it if necessary."""
        now, lease = self._clock.monotonic(), self._rendezvous.lease
        needed = 0.0
        if self._fence is None:
            self._until = max(self._until, self._rendezvous.confirmed_at + lease)
        else:  # a heartbeat's answer does not say how long it is valid
            needed = lease / 2
        if not self.awaited and self._until - now < needed:
            self.awaited = True
            self._ask(now)
            if self._link_down:
                self._log()
        return self.awaited

    def on_event(self, event: Event) -> None:
        """Handle an event that might be an answer, or the start or end of a session."""
        match event:
            case Confirmed(number=answered, valid_for=valid_for) if answered in self._sent:
                self._until = max(self._until, self._sent[answered] + min(self._rendezvous.lease, valid_for))
                self._sent = {number: at for number, at in self._sent.items() if number > answered}
                self.awaited &= answered < self._number
                if self._ask_at < math.inf:
                    self._move_fence()
            case LinkDown():
                self._link_down = True
                if self.awaited:
                    self._log()
            case LinkUp():
                self._link_down = False
            case _:
                pass

    # The fence: only with `--fence`

    def workers_start(self) -> None:
        """Ask regularly: the workers of a round are about to start."""
        if self._fence is not None and self._rendezvous.lease < math.inf:
            self._ask_at = self._clock.monotonic() + self._rendezvous.lease / _ASKED_PER_LEASE
            self._move_fence()

    def workers_ended(self) -> None:
        """Stop asking: no worker of a round is left. Idempotent."""
        if self._ask_at < math.inf and self._fence is not None:
            self._ask_at = math.inf
            self._fence(math.inf)

    def wake_in(self) -> float:
        """Seconds until the next request is due; infinity for never."""
        return max(0.0, self._ask_at - self._clock.monotonic())

    def step(self) -> None:
        """Send a request if one is due."""
        now = self._clock.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + self._rendezvous.lease / _ASKED_PER_LEASE
            self._ask(now)

    def has_fenced(self) -> bool:
        """Whether the running workers' answer expired, and so the reaper killed them."""
        return self._ask_at < math.inf and self._clock.monotonic() >= self._until

    def _ask(self, now: float) -> None:
        self._number += 1
        self._sent = {number: at for number, at in self._sent.items() if now - at <= self._rendezvous.lease}
        self._sent[self._number] = now
        self._rendezvous.send(ConfirmRequest(self._number))

    def _move_fence(self) -> None:
        assert self._fence is not None
        self._fence(self._until)

    def _log(self) -> None:
        log.warning(
            "nothing has arrived from the control plane for more than %g s; the workers will start when it "
            "confirms their round",
            self._rendezvous.lease,
        )
