"""Look-ups and connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from rallypoint.clusters.preflight.dialing import (
    Attempt,
    DialOutcome,
    MeshListener,
    Target,
    attempt_all,
    dial_all,
    look_up,
)
from rallypoint.clusters.preflight.mesh import MeshNode
from tests.ports import free_port

SCOPE = "job/coordinator/0"
TIMEOUT = 120.0


def test_attempt_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert attempt_all([("127.0.0.1", port)]) == [Attempt("127.0.0.1", DialOutcome.ACCEPTED)]
    assert attempt_all([("127.0.0.1", port)]) == [Attempt("127.0.0.1", DialOutcome.REFUSED, "Connection refused")]
    assert attempt_all([]) == []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        where = ("127.0.0.1", full.getsockname()[1])
        with socket.create_connection(where):  # fills the backlog
            assert attempt_all([where], 0.2) == [Attempt("127.0.0.1", DialOutcome.SILENT)]


def test_a_look_up_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def hang(host: str) -> list[str]:
        answered.wait(30)
        return ["10.0.0.1"]

    monkeypatch.setattr("rallypoint.clusters.preflight.dialing.resolve", hang)
    try:
        assert look_up("node1", 0.05).unanswered
    finally:
        answered.set()


def node(rank: int, scope: str = SCOPE) -> MeshNode:
    return MeshNode(scope, rank, f"n{rank}")


@contextmanager
def answering(who: MeshNode) -> Iterator[int]:
    """Serve a listener of this node on a thread; yield its port."""
    listener = MeshListener("127.0.0.1", only_here=True)
    thread = threading.Thread(target=listener.serve, args=(who,))
    thread.start()
    try:
        yield listener.port
    finally:
        listener.close()
        thread.join()


@contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """Serve another listener with `serve`; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with server.accept()[0] as visitor, suppress(OSError):
                serve(visitor)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def dial(port: int, expected: MeshNode, timeout: float = TIMEOUT, address: str = "127.0.0.1") -> str:
    """Why node 0 cannot reach this node; empty if it can."""
    found = dial_all([Target(expected, address, port)], node(0), timeout)
    return found.get(expected.group_rank, "")


def test_dial_a_node() -> None:
    with answering(node(1)) as port:
        assert dial(port, node(1)) == ""
        assert dial(port, node(1), address="localhost") == ""
        assert dial(port, node(2)) == "n1 (group rank 1) answers there: two nodes have this address"
        assert dial(port, node(1, "job/another/0")) == "an agent of another job answers there, on n1"
        with socket.create_connection(("127.0.0.1", port), TIMEOUT):
            assert dial(port, node(1)) == "", "a silent client blocks nobody"


def test_dial_other_listeners() -> None:
    with listening(lambda visitor: [visitor.send(b"HTTP/1.0 400 Bad Request\r\n\r\n"), visitor.recv(99)]) as port:
        assert dial(port, node(1)) == "no agent of this job is listening there"
    with listening(lambda visitor: visitor.sendall(b"\xff" * 100_000)) as port:
        assert dial(port, node(1)) == "no agent of this job is listening there"
    with listening(lambda visitor: None) as port:
        assert dial(port, node(1)) == "the connection was closed without an answer"
    with listening(lambda visitor: visitor.recv(99)) as port:
        assert dial(port, node(1), timeout=1.0) == "the connection was accepted, but nothing answers"


def test_dial_without_a_listener() -> None:
    port = free_port()
    assert dial(port, node(0)) == "connection refused"
    shared = "connection refused (127.0.0.1 is an address of n0 too)"
    assert dial(port, node(1)) == shared, "like Docker's bridge, which has the same address everywhere"
    assert dial(port, node(1), address="no-such-host.invalid").startswith("its address cannot be resolved: ")
    assert dial(9, node(1), address="255.255.255.255") != "", "fails at once"


def test_nodes_are_dialled_concurrently() -> None:
    with answering(node(1)) as port, listening(lambda visitor: visitor.recv(99)) as silent:
        targets = [Target(node(1), "127.0.0.1", port) for _ in range(100)]
        assert dial_all([Target(node(2), "127.0.0.1", silent), *targets], node(0), 3.0) == {
            2: "the connection was accepted, but nothing answers"
        }
