"""Which user holds the other end of a connection: the kernel's answers for real connections of real users."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Thread

import pytest

from rallypoint.base import netlink as subject
from rallypoint.base.endpoint import listening_socket
from rallypoint.base.netlink import Peer, PeerUsers
from tests.faults.other_user import as_other_user

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a second user")

WAYS = ["netlink", "the tables of /proc"]


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernel is asked. Without netlink, /proc/net has the same."""
    if request.param != WAYS[0]:
        monkeypatch.setattr(subject, "_SOCK_DIAG", 255)  # there is no such family
    return str(request.param)


def peer_of(connected: socket.socket) -> Peer:
    """Who is at the other end."""
    with closing(PeerUsers()) as users:
        return users.peer_of(connected)


@contextmanager
def connection(host: str, dial: str, connect: Callable[[tuple[str, int]], object]) -> Iterator[socket.socket]:
    """The accepted end of a connection to a listener at `host` that is dialled at `dial`."""
    with listening_socket(host, 0) as listener:
        listener.setblocking(True)
        kept = connect((dial, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            yield accepted
        if isinstance(kept, socket.socket):
            kept.close()


@pytest.mark.parametrize(("host", "dial"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("", "127.0.0.1"), ("", "::1")])
def test_a_connection_of_this_process_is_its_users(host: str, dial: str) -> None:
    with connection(host, dial, socket.create_connection) as accepted:
        assert peer_of(accepted) is Peer.OWN_USER


@pytest.mark.process
@root
@pytest.mark.parametrize(("host", "dial"), [("127.0.0.1", "127.0.0.1"), ("", "127.0.0.1"), ("", "::1")])
def test_a_connection_of_another_user_is_its_own(host: str, dial: str) -> None:
    with listening_socket(host, 0) as listener:
        listener.setblocking(True)
        port = listener.getsockname()[1]
        mine, theirs = socket.socketpair()

        def connect() -> int:
            made = socket.create_connection((dial, port))
            theirs.sendall(b"connected")
            theirs.recv(1)  # until it has been looked at
            made.close()
            return os.getuid()

        thread = Thread(target=as_other_user, args=(connect,))
        thread.start()
        accepted, _ = listener.accept()
        mine.recv(16)
        found = peer_of(accepted)
        mine.sendall(b"x")
        thread.join()
        for each in (accepted, mine, theirs):
            each.close()
    assert found is Peer.OTHER_USER


def test_an_end_that_is_closed_is_nobodys() -> None:
    """The kernel shows user 0 for it, who may do everything."""
    with connection("127.0.0.1", "127.0.0.1", socket.create_connection) as accepted:
        assert peer_of(accepted) is Peer.OWN_USER

    def leave(address: tuple[str, int]) -> None:
        socket.create_connection(address).close()

    with connection("127.0.0.1", "127.0.0.1", leave) as accepted:
        assert peer_of(accepted) is Peer.OTHER_USER


def test_an_end_that_will_send_no_more_is_nobodys() -> None:
    def half_close(address: tuple[str, int]) -> socket.socket:
        made = socket.create_connection(address)
        made.shutdown(socket.SHUT_WR)
        return made

    with connection("127.0.0.1", "127.0.0.1", half_close) as accepted:
        assert peer_of(accepted) is Peer.OTHER_USER
