"""Opens a node's sessions, one after another: attempt after attempt, wherever the control plane is by then."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.log import get_logger
from rallypoint.client.dialing import RETRYABLE, ClientSession, Dialer, error_words
from rallypoint.client.endpoint_resolver import DialTarget, EndpointResolver
from rallypoint.membership.state import Settings
from rallypoint.protocol.handshake import HandshakeError

log = get_logger(__name__)

_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_CONNECT_FIRST, _CONNECT_AGAIN = 5.0, 1.5
"""Seconds for one attempt at a TCP connection. A lost packet is sent again after a second, then after ever longer
pauses: when a link comes back, a new attempt is faster.
"""
_REMIND_FIRST, _REMIND_AGAIN = 2.0, 10.0
"""Seconds until a line says that the server cannot be reached: one that was never reached, one that was lost."""
_REMIND_LEAST, _REMIND_MOST = 60.0, 300.0
"""Seconds between later lines, which become fewer."""


class Redialer:
    """Opens sessions again and again. Everything here happens on the loop's thread, except the constructor."""

    def __init__(self, resolver: EndpointResolver, settings: Settings, local_id: int) -> None:
        self.target: DialTarget | None = None
        """The target of the last attempt, which the dialer is for."""
        self.endpoint_moved = asyncio.Event()
        """Set to make the next attempt at once."""
        self._resolver = resolver
        self._settings = settings
        self._local_id = local_id
        self._dialer: Dialer | None = None
        self._last_error = ""
        """Why the last attempt failed."""

    async def open(
        self, incarnation: str, embedded: bool, remaining: Callable[[], float], failure: Callable[[str, float], str]
    ) -> ClientSession:
        """Dial until a session is open.

        Args:
            incarnation: the coordinator of the last session. Empty if there was none yet: then this gives up at once if
                waiting will not help.
            embedded: whether the server may live inside an agent of the job.
            remaining: seconds that are left to try.
            failure: makes the sentence for when they are over, from the reason and the number of seconds.

        Raises:
            HandshakeError: there was no session yet, and the service there is not the right one.
            TimeoutError: the time is over.
        """
        first = not incarnation
        delay, began = _FIRST_DELAY, SYSTEM_CLOCK.monotonic()
        self._last_error = ""
        reminder = asyncio.ensure_future(self._report_unreachable(remaining, first))
        try:
            while True:
                self.endpoint_moved.clear()
                try:
                    # Not wait_for: it may swallow a cancellation that arrives at the very moment of success.
                    async with asyncio.timeout(max(0.1, min(remaining(), 60.0))):
                        return await self._dial(_CONNECT_FIRST if first else _CONNECT_AGAIN, incarnation, embedded)
                except RETRYABLE as error:
                    self._last_error = error_words(error) or self._attempt_in_progress or type(error).__name__
                except HandshakeError as error:
                    if first:
                        raise
                    self._last_error = str(error)
                if remaining() <= 0:
                    raise TimeoutError(failure(self._last_error, SYSTEM_CLOCK.monotonic() - began))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(delay * random.uniform(0.5, 1.0), remaining())):
                        await self.endpoint_moved.wait()
                delay = min(delay * 1.5, _LONGEST_DELAY)
        finally:
            reminder.cancel()

    @property
    def _attempt_in_progress(self) -> str:
        return "" if self._dialer is None else self._dialer.unfinished

    async def _report_unreachable(self, remaining: Callable[[], float], first: bool) -> None:
        """Log from time to time that the server cannot be reached, and why, also during an attempt."""
        pause = _REMIND_FIRST if first else _REMIND_AGAIN
        while True:
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, _REMIND_LEAST), _REMIND_MOST)
            advice = f"; {self._resolver.advice}" if first else ""
            left = remaining()
            limit = "the workers run on" if left == float("inf") else f"giving up in {left:.0f} s"
            why = self._last_error or self._attempt_in_progress
            log.warning("waiting for the control plane at %s (%s)%s; %s", self._resolver, why, advice, limit)

    async def _dial(self, timeout: float, incarnation: str, embedded: bool) -> ClientSession:
        """Make one attempt, at the present place of the control plane."""
        place = self._resolver.resolve()
        if place is None:
            raise OSError(self._resolver.unresolved_reason())
        if self._dialer is None or place != self.target:
            self.target = place
            self._dialer = Dialer(place, self._settings, self._local_id)
        try:
            return await self._dialer.dial(timeout, incarnation, self._resolver.resolved if embedded else None)
        except RETRYABLE as error:
            self._resolver.failed(place, error)
            raise
        except HandshakeError as error:
            self._resolver.failed(place, error)
            if self._resolver.is_permanent:
                raise
            raise OSError(str(error)) from None
