"""Stores that are garbage, and processes that end with open stores."""

from __future__ import annotations

import sys
import threading

import pytest

from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreConnectionError
from tests.ports import free_port
from tests.processes import completed

CIRCLE = """
import gc, sys
from rallypoint.store.client import TCPStore
for number in range(4):
    store = TCPStore("localhost", int(sys.argv[1]), is_master=True)
    if number % 2:  # the collector comes to what is older first, which is the socket then
        younger = TCPStore.__new__(TCPStore)
        vars(younger).update(vars(store))
        vars(store).clear()
        store = younger
        del younger
    vars(store)["itself"] = store
    del store
    gc.collect()
"""


@pytest.mark.process
def test_a_store_that_is_dropped_in_a_circle_leaves_its_port_and_warns_of_nothing() -> None:
    command = [sys.executable, "-W", "always", "-c", CIRCLE, str(free_port())]
    done = completed(command)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_shared_server_lives_as_long_as_one_store() -> None:
    first = TCPStore("localhost", 0, is_master=True, multi_tenant=True)
    port = first.port
    second = TCPStore("localhost", port, is_master=True, multi_tenant=True)
    del first
    second.set("key", "value")
    del second
    with pytest.raises(StoreConnectionError, match="within"):
        TCPStore("localhost", port, timeout=0.1)


def test_a_clone_holds_no_server() -> None:
    store = TCPStore("localhost", 0, is_master=True)
    clone = store.clone()
    del store
    with pytest.raises(StoreConnectionError):
        clone.get("key")
    clone.close()


def test_many_threads_drop_stores_of_one_server() -> None:
    first = TCPStore("localhost", 0, is_master=True, multi_tenant=True)

    def use() -> None:
        for _ in range(20):
            TCPStore("localhost", first.port, is_master=True, multi_tenant=True).add("count", 1)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert first.add("count", 0) == 80
    first.close()


OPEN = {
    "a store": "kept = TCPStore('localhost', 0, is_master=True); kept.set('key', 'value')",
    "a rendezvous": "kept = rendezvous(); kept.next_rendezvous().store.set('key', 'value')",
    "a health check": "kept = HealthCheckServer(float, 0, 60); kept.start()",
}
_IMPORTS = """
import gc
from rallypoint.observe.health import HealthCheckServer
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.handler import get_rendezvous_handler
from rallypoint.store.client import TCPStore
def rendezvous():
    return get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
"""


@pytest.mark.parametrize("end", ["", "del kept; gc.collect()"], ids=["kept", "dropped"])
@pytest.mark.parametrize("what", OPEN.values(), ids=OPEN)
@pytest.mark.process
def test_a_process_that_ends_with_something_open_says_nothing(what: str, end: str) -> None:
    program = "\n".join([_IMPORTS, what, end])
    ended = completed([sys.executable, "-c", program], check=True)
    assert ended.stderr == ""
