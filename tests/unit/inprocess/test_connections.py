"""Connections that another thread ends; those of gloo are in tests/conformance."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

from rallypoint.inprocess.aborting import end_connections


def test_only_connections_to_the_store_are_ended() -> None:
    open_before = os.listdir("/proc/self/fd")
    with ExitStack() as opened:
        store, other = (opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        waits, own = (opened.enter_context(socket.create_connection(to.getsockname())) for to in (store, other))
        left, right = map(opened.enter_context, socket.socketpair())
        far = opened.enter_context(other.accept()[0])
        unconnected = opened.enter_context(socket.socket())
        end_connections(store.getsockname()[1], workers=3)
        assert waits.recv(1) == b"", "the read returns"
        for near, end in ((own, far), (left, right)):
            near.send(b"1")
            assert end.recv(1) == b"1"
        unconnected.connect(store.getsockname())
        for _ in range(2):
            store.accept()[0].close()
    assert os.listdir("/proc/self/fd") == open_before
