"""A link's failures: they show that the coordinator's port is closed, or nothing."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import listening_socket
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.election.keys import LeaderRecord
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.handshake import HandshakeError

LEASE = 7
REFUSED = ConnectionRefusedError("Connection refused")
UNKNOWN = socket.gaierror("Name or service not known")
SILENT = TimeoutError("it does not answer a TCP connection")
NOT_OURS = HandshakeError("what listens there is not ours")


def posted_at(*addresses: str) -> LeaderResolver:
    posted = LeaderResolver("etcd")
    posted.update(LeaderRecord(addresses, 2000, LEASE, "s"), 1)
    return posted


def attempts(posted: LeaderResolver, **outcomes: Exception) -> int:
    """Fail at each host twice with its outcome. Returns the lease of the closed port."""
    for _ in range(2 * len(outcomes)):
        place = posted.resolve()
        assert place is not None
        posted.on_failure(place, outcomes[place.endpoint.host])
    return posted.refusing_lease


def test_a_port_that_refuses_at_all_addresses_is_closed() -> None:
    assert attempts(posted_at("one"), one=REFUSED) == LEASE
    assert attempts(posted_at("here", "host"), here=REFUSED, host=REFUSED) == LEASE


@pytest.mark.parametrize("else_", [UNKNOWN, SILENT, NOT_OURS])
def test_a_refusal_at_loopback_proves_nothing_about_another_machine(else_: Exception) -> None:
    """The coordinator's first address is loopback, and each machine has a member of etcd."""
    assert attempts(posted_at("here", "host"), here=REFUSED, host=else_) == 0


def test_refusals_at_one_address_are_not_enough() -> None:
    posted = posted_at("here", "host")
    attempts(posted, here=REFUSED, host=SILENT)
    while (place := posted.resolve()) is None or place.endpoint.host != "host":
        assert place is not None
        posted.on_failure(place, REFUSED)
    assert posted.refusing_lease == 0


def test_the_next_address_is_tried_after_a_foreign_server() -> None:
    posted = posted_at("here", "host")
    for host in ("here", "host", "here"):
        place = posted.resolve()
        assert place is not None
        assert place.endpoint.host == host
        posted.on_failure(place, NOT_OURS)


def test_a_link_skips_a_foreign_server_at_the_coordinator_s_port() -> None:
    settings = Settings("job", 1, 1)
    listener, other = _two_at_one_port()
    server = ControlServer(Dispatcher(settings), listener, keys=lambda _job: (b"s",))
    posted = LeaderResolver("etcd")
    posted.update(LeaderRecord(("127.0.0.1", "127.0.0.2"), server.port, LEASE, "s"), 1)
    greeted = threading.Event()
    posted.on_news = lambda: greeted.set() if posted.met else None
    with other:
        answering = threading.Thread(target=_answer_all, args=(other,))
        answering.start()
        link = TcpLink(posted, settings, NodeId("", 1, 0), lambda _notice: None, Deadline.after(30.0))
        met = greeted.wait(10.0)
        other.shutdown(socket.SHUT_RDWR)
        answering.join()
    link.close()
    server.close()
    assert met


def _two_at_one_port() -> tuple[socket.socket, socket.socket]:
    """Listening sockets at 127.0.0.2 and at 127.0.0.1, at a port that nobody else had at either."""
    while True:
        first = listening_socket("127.0.0.2", 0)
        try:
            return first, socket.create_server(("127.0.0.1", first.getsockname()[1]))
        except OSError:  # taken there; the next port may be free at both
            first.close()


def _answer_all(other: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is shut
        while True:
            connection, _ = other.accept()
            with connection:
                connection.recv(16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)


def test_reasons_why_no_coordinator_is_known() -> None:
    posted = LeaderResolver("etcd:2379")
    assert posted.unresolved_reason() == "etcd has not answered yet"
    posted.update(None, 7)
    assert posted.unresolved_reason() == "no agent has been elected coordinator yet"
    posted.trouble = "etcd at etcd:2379 did not answer within 3 s"
    assert posted.unresolved_reason() == posted.trouble
