"""Limits each tenant's share of a server's sessions and loop time.

With a secret, a tenant is a job, since nodes prove that they belong to it; without one, a tenant is an address. Laws:

1. Only a server of many jobs has tenants: the nodes of one job share its fate.
2. A tenant gets at most half of the sessions for which descriptors exist.
3. A tenant can use the loop for `BURST` seconds at once, and then for the fraction `RATE` of the time. Its other input
   is read later. A tenant that is alone never waits.
"""

from __future__ import annotations

from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.descriptors import connection_limit
from rallypoint.control.protocol.handshake import HandshakeError

BURST, RATE = 1.0, 0.5


class _Tenant(NamedTuple):
    sessions: int
    debt: float
    """Seconds of loop time used beyond its rate, at `at`."""
    at: float


class Shares:
    """The shares of one server's tenants. On the loop's thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, tenant: str) -> None:
        """Add a session of this tenant.

        Raises:
            HandshakeError: the tenant has too many sessions.
        """
        most = connection_limit() // 2
        record = self._tenants.get(tenant, _Tenant(0, 0.0, self._clock.monotonic()))
        if record.sessions >= most:
            raise HandshakeError(
                f"{tenant} has {most} sessions, half of this control plane's capacity; close some of them, or raise "
                "its limit of open files (`ulimit -Hn`)"
            )
        self._tenants[tenant] = record._replace(sessions=record.sessions + 1)

    def leave(self, tenant: str) -> None:
        """Remove a session of this tenant."""
        record = self._tenants[tenant]
        if record.sessions > 1:
            self._tenants[tenant] = record._replace(sessions=record.sessions - 1)
        else:
            del self._tenants[tenant]

    def used(self, tenant: str, seconds: float) -> None:
        """Note that the loop spent `seconds` on this tenant."""
        record = self._tenants.get(tenant)
        if record is not None:
            now = self._clock.monotonic()
            debt = max(0.0, record.debt - RATE * (now - record.at)) + seconds
            self._tenants[tenant] = record._replace(debt=debt, at=now)

    def wait(self, tenant: str) -> float:
        """Seconds until this tenant's input may be read; 0 for now."""
        record = self._tenants.get(tenant)
        if record is None or record.debt <= BURST or len(self._tenants) < 2:
            return 0.0
        return max(0.0, (record.debt - BURST) / RATE - (self._clock.monotonic() - record.at))
