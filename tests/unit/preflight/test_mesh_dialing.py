"""Dialing real listeners: those of the round, and whatever else may answer at an address."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rallypoint.base.poll import until_readable
from rallypoint.preflight.mesh_dialing import MeshListener, Target, dial_all
from rallypoint.preflight.mesh_handshake import MeshNode
from tests.ports import free_port

SCOPE = "job/coordinator/0"
TIMEOUT = 120.0


def node(rank: int, scope: str = SCOPE) -> MeshNode:
    return MeshNode(scope, rank, f"n{rank}")


@contextmanager
def answering(who: MeshNode) -> Iterator[int]:
    """A listener of this node, stepped by a thread; gives its port."""
    listener = MeshListener("127.0.0.1", only_here=True)
    listener.own = who
    ended, over = os.eventfd(0), threading.Event()

    def serve() -> None:
        while not over.is_set():
            until_readable([*listener.fds(), ended], 60)
            listener.step()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.port
    finally:
        over.set()
        os.eventfd_write(ended, 1)
        thread.join()
        listener.close()
        os.close(ended)


@contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """Something else that listens, and does this with the one who comes."""
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
    """Why node 0 has not reached this one; empty if it has."""
    never = os.eventfd(0)
    try:
        found = dial_all([Target(expected, address, port)], node(0), never, timeout)
    finally:
        os.close(never)
    return found.get(expected.group_rank, "")


def test_a_node_is_reached() -> None:
    with answering(node(1)) as port:
        assert dial(port, node(1)) == ""
        assert dial(port, node(1), address="localhost") == ""


def test_another_node_of_the_same_address_is_found() -> None:
    with answering(node(1)) as port:
        assert dial(port, node(2)) == "n1 (group rank 1) answers there: two nodes have that address"


def test_another_job_is_no_peer() -> None:
    with answering(node(1, "job/another/0")) as port:
        assert dial(port, node(1)) == "an agent of another job answers there, on n1"


def test_what_listens_may_be_anything() -> None:
    with listening(lambda visitor: [visitor.send(b"HTTP/1.0 400 Bad Request\r\n\r\n"), visitor.recv(99)]) as port:
        assert dial(port, node(1)) == "no agent of this job listens there"
    with listening(lambda visitor: visitor.sendall(b"\xff" * 100_000)) as port:
        assert dial(port, node(1)) == "no agent of this job listens there"
    with listening(lambda visitor: visitor.recv(99)) as port:
        assert dial(port, node(1)) == "the connection is closed without an answer"
    with listening(lambda visitor: [visitor.recv(99), visitor.recv(99)]) as port:
        assert dial(port, node(1), timeout=3.0) == "the connection is made and nobody answers"


def test_nobody_listens() -> None:
    port = free_port()
    assert dial(port, node(0)) == "connection refused"
    shared = "connection refused (127.0.0.1 is an address of n0 too)"
    assert dial(port, node(1)) == shared, "as with the bridge of Docker, which has one address everywhere"
    assert dial(port, node(1), address="no-such-host.invalid").startswith("its address cannot be resolved: ")


def test_many_are_dialled_side_by_side_and_none_waits_for_another() -> None:
    with answering(node(1)) as port, listening(lambda visitor: [visitor.recv(99), visitor.recv(99)]) as silent:
        never = os.eventfd(0)
        targets = [Target(node(1), "127.0.0.1", port) for _ in range(100)]
        assert dial_all([Target(node(2), "127.0.0.1", silent), *targets], node(0), never, 10.0) == {
            2: "the connection is made and nobody answers"
        }
        os.close(never)


def test_dialing_ends_when_nobody_wants_the_result() -> None:
    stopped = os.eventfd(1)
    with listening(lambda visitor: [visitor.recv(99), visitor.recv(99)]) as port:
        assert dial_all([Target(node(1), "127.0.0.1", port)], node(0), stopped, 60.0) == {}
    os.close(stopped)


def test_what_visitors_say_does_the_listener_no_harm() -> None:
    with answering(node(1)) as port:
        for words in (b"", b"hello", b"GET / HTTP/1.0\r\n\r\n" * 9, b"\xff" * 100, b"rallypoint-mesh 1 " + b"g" * 33):
            with socket.create_connection(("127.0.0.1", port), TIMEOUT) as visitor:
                visitor.sendall(words)
                answer = b""
                with suppress(OSError):  # what it has not read is refused
                    visitor.shutdown(socket.SHUT_WR)
                    answer = visitor.recv(100)
                assert answer == b"", words
        with socket.create_connection(("127.0.0.1", port), TIMEOUT):
            assert dial(port, node(1)) == "", "who says nothing keeps nobody waiting"


def test_a_dial_that_fails_at_once_leaves_no_socket() -> None:
    stopped = os.eventfd(0)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            failures = dial_all([Target(node(1), "255.255.255.255", 9)], node(0), stopped, TIMEOUT)
    finally:
        os.close(stopped)
    assert list(failures) == [1]
    assert [str(each.message) for each in told] == []
