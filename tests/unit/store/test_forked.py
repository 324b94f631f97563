"""Servers and loops in a forked process."""

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
    """Run `work` in a forked process and return its exit code."""
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


def test_a_forked_process_has_its_own_servers() -> None:
    with StoreServer() as server, TCPStore("localhost", 0, is_master=True, multi_tenant=True) as store:
        store.set("key", "ours")

        def work() -> None:
            server.close()
            with TCPStore("localhost", 0, is_master=True, timeout=20) as own:
                own.set("key", "its own")
                assert own.get("key") == b"its own"
            with pytest.raises(RuntimeError, match="cannot listen"):
                TCPStore("localhost", store.port, is_master=True, multi_tenant=True, timeout=20)

        assert forked(work) == 0
        assert store.get("key") == b"ours"
        with TCPStore("localhost", server.port) as still_open:
            assert still_open.num_keys() == 0


def test_a_forked_process_cannot_use_its_parents_loop() -> None:
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
