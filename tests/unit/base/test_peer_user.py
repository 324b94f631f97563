"""The user at the other end of a connection, asked of the kernel for real connections."""

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

    if request.param != WAYS[0]:
        monkeypatch.setattr(subject, "_SOCK_DIAG", 255)  # no such family
    return str(request.param)


def peer_of(connected: socket.socket) -> Peer:

    with closing(PeerUsers()) as users:
        return users.peer_of(connected)


@contextmanager
def connection(host: str, dial: str, connect: Callable[[tuple[str, int]], object]) -> Iterator[socket.socket]:
    """The accepted end of a connection from `dial` to a listener at `host`."""
    with listening_socket(host, 0) as listener:
        listener.setblocking(True)
        kept = connect((dial, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            yield accepted
        if isinstance(kept, socket.socket):
            kept.close()


@pytest.mark.parametrize(("host", "dial"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("", "127.0.0.1"), ("", "::1")])
def test_a_connection_of_this_user(host: str, dial: str) -> None:
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
            theirs.recv(1)  # until the test has looked at it
            made.close()
            return os.getuid()

        thread = Thread(target=as_other_user, args=(connect,))
        thread.start()
        accepted, _ = listener.accept()
        mine.recv(16)
        found = peer_of(accepted)
        mine.sendall(b"x")
        thread.join()
        for end in (accepted, mine, theirs):
            end.close()
    assert found is Peer.OTHER_USER


def test_a_closed_end_has_no_user() -> None:
    """The kernel shows user 0 for it, who may do everything."""

    def close(address: tuple[str, int]) -> None:
        socket.create_connection(address).close()

    def half_close(address: tuple[str, int]) -> socket.socket:
        made = socket.create_connection(address)
        made.shutdown(socket.SHUT_WR)
        return made

    for connect in (close, half_close):
        with connection("127.0.0.1", "127.0.0.1", connect) as accepted:
            assert peer_of(accepted) is Peer.OTHER_USER
