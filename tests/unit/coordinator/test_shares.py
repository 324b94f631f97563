"""Each tenant's share of a server."""

from __future__ import annotations

import pytest

from rallypoint.base.descriptors import connection_limit
from rallypoint.control.coordinator.shares import BURST, RATE, Shares
from rallypoint.control.protocol.handshake import HandshakeError
from tests.unit.clocks import HandClock


def test_a_tenant_beyond_its_share_waits_unless_it_is_alone() -> None:
    clock = HandClock(100.0)
    shares = Shares(clock)
    shares.enter("greedy")
    shares.enter("modest")
    shares.used("greedy", BURST)
    shares.used("modest", BURST / 2)
    assert (shares.wait("greedy"), shares.wait("modest")) == (0.0, 0.0)
    shares.used("greedy", 3.0)
    assert (shares.wait("greedy"), shares.wait("modest")) == (3.0 / RATE, 0.0)
    shares.leave("modest")
    assert shares.wait("greedy") == 0.0
    shares.enter("modest")
    clock.now += 2.0
    assert shares.wait("greedy") == 3.0 / RATE - 2.0
    clock.now += 3.0 / RATE - 2.0
    assert shares.wait("greedy") == 0.0


def test_a_tenant_has_at_most_half_of_the_sessions() -> None:
    shares = Shares(HandClock(100.0))
    most = connection_limit() // 2
    for _ in range(min(most, 100_000)):
        shares.enter("greedy")
    if most <= 100_000:
        with pytest.raises(HandshakeError, match=f"greedy has {most} sessions"):
            shares.enter("greedy")
        shares.leave("greedy")
        shares.enter("greedy")
    shares.enter("modest")
    shares.leave("modest")
    shares.used("modest", 5.0)
    assert shares.wait("modest") == 0.0, "a tenant that left is forgotten"
