"""Checks that rank 0 of a static job runs where the job's endpoint leads, and reports if it does not.

A node started without its --node-rank gets rank 0, serves its own job, and would wait for the others until the timeout.

Laws:

1. Only certainty ends a job. Another machine's address at the endpoint is not enough: with NAT or a virtual address, it
   might still lead here. Another server of the job that keeps answering there is enough.
2. If the endpoint leads here, according to its address or a connection, nothing is logged.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.endpoint import Endpoint, host_name, is_local_address, source_address
from rallypoint.base.log import get_logger
from rallypoint.control.client.dialing import RETRYABLE, Dialer, DialTarget, FixedEndpoint, error_words
from rallypoint.control.protocol.handshake import HandshakeError
from rallypoint.control.protocol.messages import LinkLost
from rallypoint.rendezvous.elastic import own_node

if TYPE_CHECKING:
    from rallypoint.control.coordinator.dispatcher import Dispatcher
    from rallypoint.control.protocol.messages import Deliver

log = get_logger(__name__)

_TELL_AFTER, _UNKNOWN_AFTER = 0.8, 2.0
"""Seconds for the endpoint to lead here, and for its name to resolve."""
_REFUSE_AFTER = 2.0
"""Seconds for which another server of the job must have answered. A server that was just replaced might still be
ending."""
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_ATTEMPT_TIMEOUT = 0.5


def must_run_sentence(endpoint: Endpoint, addresses: list[str]) -> str:
    """`rank 0 must run on n1 (10.77.0.1); this is 10.77.0.2`.

    Args:
        endpoint: the job's endpoint. addresses: its host's addresses; empty if unknown.
    """
    where = endpoint.host
    if addresses and addresses != [endpoint.host]:
        where += f" ({', '.join(addresses)})"
    try:
        own = source_address(Endpoint(addresses[0], endpoint.port)) if addresses else host_name()
    except OSError:
        own = host_name()
    return f"rank 0 must run on {where}; this is {own}"


class RankZeroResolver(FixedEndpoint):
    """A static job's endpoint, for a node with another rank."""

    def __init__(self, place: DialTarget, rank: int) -> None:
        super().__init__(place)
        self._rank = rank
        self._addresses: list[str] = []

    @property
    def advice(self) -> str:
        """What to do if no server is found there."""
        instruction = must_run_sentence(self.target.endpoint, self._addresses)
        return f"{instruction} with --node-rank {self._rank}; check {self.target.flag}, and that rank 0 has started"

    def resolved(self, addresses: list[str]) -> None:
        """Store the addresses for the sentence."""
        self._addresses = addresses


class _EndpointIsLocal(Exception):
    """The endpoint is on this machine or is forwarded here."""


class EndpointCheck:
    """On rank 0, checks whether the endpoint leads here, until that is known or the first round is complete."""

    def __init__(self, place: DialTarget, dispatcher: Dispatcher, deliver: Deliver) -> None:
        """Prepare; does nothing before `start`.

        Args:
            place: the job's endpoint.
            dispatcher: the job's dispatcher, served here.
            deliver: called with a `LinkLost` if the endpoint belongs to another job.
        """
        self._target = place
        self._dispatcher = dispatcher
        self._deliver = deliver
        self._dialer = Dialer(place, dispatcher.settings, own_node())
        self._addresses: list[str] = []
        self._answered_at: float | None = None
        """Since when another server of the job has answered each attempt."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start. On the loop's thread."""
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End the check, if still running. On the loop's thread."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._probe()
        except _EndpointIsLocal:
            log.info("%s is an address of this machine", self._target.endpoint)
        except Exception:  # the job does not need the check
            log.exception("cannot determine whether %s is an address of this machine", self._target.endpoint)

    async def _probe(self) -> None:
        began, delay, reported = SYSTEM_CLOCK.monotonic(), _FIRST_DELAY, False
        while not self._dispatcher.state.complete:
            why = await self._attempt()
            now = SYSTEM_CLOCK.monotonic()
            if self._answered_at is not None and now - self._answered_at >= _REFUSE_AFTER:
                self._deliver(LinkLost(self._sentence(why)))
                return
            if not reported and (self._answered_at is not None or now - began >= self._report_after()):
                reported = True
                log.warning("%s", self._sentence(why))
            await asyncio.sleep(delay)
            delay = min(1.5 * delay, _LONGEST_DELAY)

    def _report_after(self) -> float:
        return _TELL_AFTER if self._addresses else _UNKNOWN_AFTER

    async def _attempt(self) -> str:
        """Connect to the endpoint once. Returns the finding; raises _EndpointIsLocal if the endpoint leads here."""
        try:
            session = await self._dialer.dial(_ATTEMPT_TIMEOUT, resolved=self._resolved)
        except (*RETRYABLE, HandshakeError) as error:
            self._answered_at = None
            return error_words(error) or self._dialer.unfinished
        session.writer.close()
        if session.welcome.incarnation == self._dispatcher.incarnation:
            raise _EndpointIsLocal
        self._answered_at = self._answered_at or SYSTEM_CLOCK.monotonic()
        return "another node of this job has rank 0 there"

    def _resolved(self, addresses: list[str]) -> None:
        self._addresses = addresses
        if any(map(is_local_address, addresses)):
            raise _EndpointIsLocal

    def _sentence(self, why: str) -> str:
        endpoint, flag = self._target.endpoint, self._target.flag
        if not self._addresses:
            return f"{flag} is set to {endpoint.host!r}, which does not resolve here ({why}); use an address"
        instruction = f"{must_run_sentence(endpoint, self._addresses)}; set a different --node-rank on this node"
        if self._answered_at is not None:
            return f"{instruction}: {why}"
        return (
            f"{instruction}, or check {flag}: it does not lead to this machine ({why}), but it might do so through NAT "
            "or a virtual address"
        )
