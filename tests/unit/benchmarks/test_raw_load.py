"""The load on a store: it drives our server through its cycles, and notices a server that lies."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from benchmarks.messages import Connect, Drive
from benchmarks.programs import raw_load
from benchmarks.programs.raw_load import connect, drive
from benchmarks.programs.raw_wire import LoadError, handshake

from rallypoint.store.server import StoreServer


@pytest.fixture(params=["C", "Python"], autouse=True)
def _driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load in C, and the one for where there is no compiler."""
    if request.param == "Python":
        monkeypatch.setattr(raw_load, "_library", None)
    elif raw_load._library is None:
        pytest.skip("there is no compiler")


def test_every_client_gets_through_its_cycle_against_our_server() -> None:
    with StoreServer("127.0.0.1") as server:
        clients, connected = connect(Connect(server.port, clients=3, first_client=0, at_least=5))
        try:
            driven = drive(clients, Drive(0.05, os.getpid()))
        finally:
            clients.close()
    assert len(connected.latencies) == 6
    assert len(connected.storms) == 2
    assert driven.requests >= len(driven.latencies) > 0
    assert driven.server_seconds > 0


def test_a_wrong_answer_is_no_figure() -> None:
    def lie(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as connection:
            hello = handshake(os.getpid())
            received = b""
            while len(received) < len(hello.message):
                received += connection.recv(len(hello.message))
            connection.sendall(hello.reply or b"")
            connection.recv(4096)
            connection.sendall(b"\x01")  # a WAIT is answered by 0
            connection.recv(4096)

    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    liar = threading.Thread(target=lie, args=(listener,))
    liar.start()
    clients, _ = connect(Connect(port, clients=1, first_client=0, at_least=1))
    try:
        with pytest.raises(LoadError, match=r"the server answered (b'\\x01' to|wrongly)"):
            drive(clients, Drive(5.0, os.getpid()))
    finally:
        clients.close()
        liar.join()
