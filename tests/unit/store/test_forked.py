"""Servers and loops in a copy of the process that made them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from rallypoint.base.loop import LoopError, LoopThread, shared_loop
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer

pytestmark = pytest.mark.process


def forked(work: Callable[[], None]) -> int:
    """The exit code of a copy of this process that does only this; 0 if all went well."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_copy_serves_by_itself() -> None:
    with TCPStore("localhost", 0, is_master=True) as store:
        store.set("key", "ours")

        def work() -> None:
            with TCPStore("localhost", 0, is_master=True, timeout=20) as own:
                own.set("key", "its own")
                assert own.get("key") == b"its own"

        assert forked(work) == 0
        assert store.get("key") == b"ours"


def test_what_a_copy_closes_lives_on_where_it_was_made() -> None:
    with StoreServer() as server, TCPStore("localhost", server.port) as store:
        assert forked(server.close) == 0
        store.set("key", "there")
        assert store.get("key") == b"there"


def test_a_copy_shares_no_server_by_its_port() -> None:
    with TCPStore("localhost", 0, is_master=True, multi_tenant=True) as store:

        def work() -> None:
            with pytest.raises(RuntimeError, match="cannot listen"):
                TCPStore("localhost", store.port, is_master=True, multi_tenant=True, timeout=20)

        assert forked(work) == 0


def test_a_loop_of_the_original_says_so() -> None:
    loop = LoopThread()
    loop.call(lambda: None)
    assert shared_loop() is shared_loop()
    original = shared_loop()

    def work() -> None:
        loop.stop()
        assert shared_loop() is not original
        with pytest.raises(LoopError, match="create a new one after the fork"):
            loop.call(lambda: None)

    try:
        assert forked(work) == 0
    finally:
        loop.stop()
