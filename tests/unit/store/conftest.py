"""Servers and log lines for the tests of the store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from rallypoint.base.endpoint import listening_socket
from rallypoint.store.server import StoreServer, StoreThread
from tests.unit.store.both import KINDS, choose, logged


class SharedPort:
    """A server that reads a connection's first bytes and passes it to a store, as a static job's port does."""

    def __init__(self) -> None:
        self._listener = listening_socket("127.0.0.1", 0)
        self._listener.setblocking(True)
        self.port: int = self._listener.getsockname()[1]
        self._store = StoreThread("the store behind a shared port")
        self._thread = threading.Thread(target=self._hand_over)
        self._thread.start()

    def _hand_over(self) -> None:
        while True:
            client, _ = self._listener.accept()
            data = client.recv(100_000)
            if data == b"close":
                client.close()
                return
            self._store.add_connection(client, data)

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as last:
            last.sendall(b"close")
            self._thread.join()
        self._listener.close()
        self._store.close()


@pytest.fixture(name="core", params=KINDS)
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each kind of server."""
    choose(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(name="server", params=[*KINDS, *(f"adopted-{kind}" for kind in KINDS)])
def _server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer | SharedPort]:
    """A server on 127.0.0.1 of each kind, which accepts its connections or adopts them."""
    choose(request.param.removeprefix("adopted-"), monkeypatch)
    server: StoreServer | SharedPort = (
        SharedPort() if request.param.startswith("adopted-") else StoreServer("127.0.0.1")
    )
    yield server
    server.close()


@pytest.fixture(name="lines")
def _lines() -> Iterator[list[str]]:
    """The lines that the store logs during the test."""
    with logged() as lines:
        yield lines
