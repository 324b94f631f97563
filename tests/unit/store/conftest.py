"""Loops, servers and log lines for the tests of the store."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from rallypoint.base.loop import LoopThread
from rallypoint.store.connection import ServedTable, StoreProtocol
from rallypoint.store.server import StoreServer
from tests.unit.store.both import KINDS, choose


@pytest.fixture(name="loop", params=["uvloop", "asyncio"])
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    """A loop thread on uvloop, and one on a machine that has no uvloop."""
    with monkeypatch.context() as patch:
        if request.param == "asyncio":
            patch.setitem(sys.modules, "uvloop", None)
        loop = LoopThread("test-loop")
        assert type(loop.loop).__module__.startswith(request.param)
    yield loop
    loop.stop()


class Door:
    """A server on asyncio's transports that hands connections over when they begin like a store's client."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._served = ServedTable()
        self._server = loop.submit(self._listen()).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: Doorman(self._served), "127.0.0.1", 0, backlog=4096)

    def close(self) -> None:
        """End it and its connections."""
        self._loop.submit(self._close()).result()

    async def _close(self) -> None:
        self._server.close()
        self._served.close()
        while self._served.connections:
            await asyncio.sleep(0)


class Doorman(asyncio.Protocol):
    """Looks at the first byte, and steps back."""

    def __init__(self, served: ServedTable) -> None:
        self._served = served
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        transport = cast(asyncio.Transport, self._transport)
        store = StoreProtocol(self._served)
        transport.set_protocol(store)
        store.connection_made(transport)
        store.data_received(data)


@pytest.fixture(name="core", params=KINDS)
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Servers are of the one kind, then of the other."""
    choose(request.param, monkeypatch)
    kind: str = request.param
    return kind


@pytest.fixture(name="server", params=[*KINDS, "transports"])
def _server(
    request: pytest.FixtureRequest, loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreServer | Door]:
    """A server on 127.0.0.1, by each of the three ways in which a store's connections are served."""
    server: StoreServer | Door
    if request.param == "transports":
        server = Door(loop)
    else:
        choose(request.param, monkeypatch)
        server = StoreServer("127.0.0.1", loop=loop)
    yield server
    server.close()


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.levelname}: {record.getMessage()}")


@pytest.fixture(name="lines")
def _lines() -> Iterator[list[str]]:
    """What the store logs during the test."""
    handler = Lines()
    logger = logging.getLogger("rallypoint.store")
    logger.addHandler(handler)
    yield handler.seen
    logger.removeHandler(handler)
