"""Sessions that end right after they open: pauses before the next one, and giving up in time."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client import dialing
from rallypoint.control.client.dialing import LIVED, ClientSession, DialTarget, FixedEndpoint, Redialer
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.codec import frame
from rallypoint.control.protocol.messages import LinkDown, LinkLost, LinkUp
from tests.unit.coordinator.sockets import on_loop, serving
from tests.unit.coordinator.test_control import Node
from tests.waiting import until

SETTINGS = Settings("job", 1, 1)


class Pauses:
    """A redialer whose attempts all succeed, and its pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.redialer = Redialer(FixedEndpoint(DialTarget(Endpoint("h", 1))), SETTINGS, NodeId("h", 1, 0))
        self.made: list[float] = []
        self.dialed = 0
        monkeypatch.setattr(random, "uniform", lambda _low, high: high)
        monkeypatch.setattr(dialing, "_dial_spread", lambda _settings: 0.0)
        monkeypatch.setattr(self.redialer, "_dial", self._dial)
        monkeypatch.setattr(self.redialer, "endpoint_moved", self)

    async def _dial(self) -> ClientSession:
        self.dialed += 1
        return ClientSession.__new__(ClientSession)

    def clear(self) -> None: ...

    async def wait(self) -> None:
        self.made.append(self.redialer._delay)

    async def open(self, remaining: float = math.inf) -> float:
        """Open a session. Returns the pause before it."""
        self.made.clear()
        await self.redialer.open(lambda: remaining)
        return sum(self.made)


@on_loop
async def test_the_pauses_grow_until_a_session_has_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)
    assert await pauses.open() == 0.0
    found = []
    for _ in range(12):
        pauses.redialer.session_ended(0.02, "it closed the connection")
        found.append(await pauses.open())
    assert found[0] == 0.05
    assert found == sorted(found)
    assert found[-1] == 1.0
    pauses.redialer.session_ended(LIVED, "")
    assert await pauses.open() == 0.0, "no pause after a long session"


@on_loop
async def test_brief_sessions_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)
    pauses.redialer.session_ended(0.02, "it closed the connection")
    with pytest.raises(TimeoutError, match="it closed the connection"):
        await pauses.open(remaining=0.0)
    assert pauses.dialed == 0


def test_a_refused_message_ends_the_link() -> None:
    with serving(Dispatcher(Settings("job", 2, 2))) as server:
        node = Node(Endpoint("127.0.0.1", server.port))
        node.join()
        until(lambda: node.link._session is not None)
        session = node.link._session
        assert session is not None
        node.link._loop.call(lambda: session.writer.write(frame(b"\x92\x02\x91\x07")))  # a `Proof`, too late
        lost = node.hears()
        while isinstance(lost, LinkDown | LinkUp):
            lost = node.hears()
        assert isinstance(lost, LinkLost)
        assert "ended the session of this node: a Proof is not allowed here" in lost.detail
        assert not server.connections
        node.link.close()


def test_brief_sessions_are_counted() -> None:
    with serving(Dispatcher(Settings("job", 2, 2))) as server:
        node = Node(Endpoint("127.0.0.1", server.port))
        node.join()
        for number in range(1, 4):
            until(lambda: node.link._session is not None)
            (connection,) = server.connections
            server._loop.call(connection.abort)
            for kind in (LinkDown, LinkUp):
                notice = node.hears()
                assert isinstance(notice, kind)
                assert notice.brief == number
        node.link.close()


class MovingEndpoint(FixedEndpoint):
    """The endpoint of a coordinator that is replaced."""

    place = DialTarget(Endpoint("frozen", 1))

    def resolve(self) -> DialTarget:
        return self.place


@on_loop
async def test_dialing_a_replaced_coordinator_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine is frozen, and its kernel still accepts data."""
    endpoint = MovingEndpoint(MovingEndpoint.place)
    redialer = Redialer(endpoint, SETTINGS, NodeId("h", 1, 0))
    dialed: list[str] = []

    async def dial() -> ClientSession:
        redialer.target = endpoint.place
        dialed.append(endpoint.place.endpoint.host)
        if endpoint.place.endpoint.host == "frozen":
            await asyncio.Event().wait()
        return ClientSession.__new__(ClientSession)

    monkeypatch.setattr(redialer, "_dial", dial)
    opening = asyncio.ensure_future(redialer.open(lambda: math.inf))
    await asyncio.sleep(0.05)
    redialer.recheck_endpoint()
    await asyncio.sleep(0.05)
    assert dialed == ["frozen"], "it is still the coordinator"
    endpoint.place = DialTarget(Endpoint("elected", 1))
    redialer.recheck_endpoint()
    async with asyncio.timeout(5.0):
        await opening
    assert dialed == ["frozen", "elected"]
