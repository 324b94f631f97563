"""Whether the place that an agent was given still stands.

An agent that was frozen, or cut off, finds a `Placed` that may be older than the lease: by then the others have counted
its node as lost, and run without it. Laws:

1. A word of the coordinator is as old as the request that it answers. When it was read means nothing: a process that
   was frozen reads late what has come early.
2. Workers start only on a word younger than the lease. A place that was requested less than a lease ago is one, and so
   is the answer to a heartbeat; otherwise the coordinator is asked, and its answer follows all that it had to tell this
   node before.
3. Until it has answered, or has ended the round, nothing is started. The link repeats the question in each session, and
   gives up as where a place is waited for (`control.protocol.resume_state`).
4. With `--fence`, workers run only on a word younger than the lease: while they run, the coordinator is asked four
   times a lease, and each answer moves the moment at which the reaper kills them. The reaper has that moment, so that
   it comes for a frozen agent too. An elected coordinator's word lasts no longer than its own lease in etcd:

     1. A coordinates, and its node has workers. A is cut off from etcd, not from its own node.
     2. A's lease ends, B is elected, and a third of a lease later counts A's node as lost: the next round begins.
     3. A has answered its own node all the time: were its word good for a lease, the workers there would run on.
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
"""Questions in each lease while fenced workers run: with one lost or late, three are left."""


class ConfirmingClient(Protocol):
    """What this needs of a `RendezvousClient`."""

    @property
    def lease(self) -> float:
        """See `RendezvousClient.lease`."""

    @property
    def confirmed_at(self) -> float:
        """See `RendezvousClient.confirmed_at`."""

    def send(self, request: Request) -> None:
        """Send a request."""


class Confirmation:
    """Asks the coordinator, where its last word is too old.

    Args:
        rendezvous: what the coordinator is asked through.
        clock: counts the time in which the machine is suspended too.
        fence: takes the moment, on that clock, at which the workers are to be killed; None without `--fence`.
    """

    def __init__(
        self, rendezvous: ConfirmingClient, clock: Clock = BOOT_CLOCK, fence: Callable[[float], None] | None = None
    ) -> None:
        self._rendezvous = rendezvous
        self._clock = clock
        self._fence = fence
        self._until = clock.monotonic() + rendezvous.lease
        """Until when the last word of the coordinator holds: that is, for how long the others count on this node."""
        self._sent: dict[int, float] = {}
        """When the questions were sent that have no answer yet and are younger than the lease, by number."""
        self._number = 0
        """The number of the last question."""
        self._ask_at = math.inf
        """When to ask next; infinity where no fenced workers run."""
        self.awaited = False
        """Whether workers that are due to start wait for an answer; not any more once their round is over."""
        self._link_down = False

    def requests_place(self) -> None:
        """This node is about to request a place: what it is given is younger than this moment."""
        self._until, self.awaited = self._clock.monotonic() + self._rendezvous.lease, False

    def must_wait(self) -> bool:
        """Whether workers must wait until the coordinator confirms the round; asks it, if need be."""
        now, lease = self._clock.monotonic(), self._rendezvous.lease
        needed = 0.0
        if self._fence is None:
            self._until = max(self._until, self._rendezvous.confirmed_at + lease)
        else:  # the answer to a heartbeat does not say for how long it holds
            needed = lease / 2
        if not self.awaited and self._until - now < needed:
            self.awaited = True
            self._ask(now)
            if self._link_down:
                self._log()
        return self.awaited

    def on_event(self, event: Event) -> None:
        """An event has occurred that may be an answer, or the end or the beginning of a session."""
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
        """The workers of a round are about to start."""
        if self._fence is not None and self._rendezvous.lease < math.inf:
            self._ask_at = self._clock.monotonic() + self._rendezvous.lease / _ASKED_PER_LEASE
            self._move_fence()

    def workers_ended(self) -> None:
        """No worker of a round is left. Idempotent."""
        if self._ask_at < math.inf and self._fence is not None:
            self._ask_at = math.inf
            self._fence(math.inf)

    def wake_in(self) -> float:
        """Seconds until the next question is due; infinity for never."""
        return max(0.0, self._ask_at - self._clock.monotonic())

    def step(self) -> None:
        """Ask, if that is due."""
        now = self._clock.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + self._rendezvous.lease / _ASKED_PER_LEASE
            self._ask(now)

    def has_fenced(self) -> bool:
        """Whether the time of the running workers is over, so that the reaper has killed them."""
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
            "nothing was heard from the control plane for more than %g s; "
            "the workers start once it has confirmed their round",
            self._rendezvous.lease,
        )
