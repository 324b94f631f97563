"""Garbage-collected stores, and processes that end with open stores."""

from __future__ import annotations

import sys

import pytest

from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreConnectionError
from tests.ports import free_port
from tests.processes import completed
from tests.waiting import at_once

CIRCLE = """
import gc, sys
from rallypoint.store.client import TCPStore
for number in range(4):
    store = TCPStore("localhost", int(sys.argv[1]), is_master=True)
    if number % 2:  # the collector finalizes older objects first, here the socket
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
def test_a_garbage_store_frees_its_port_without_a_warning() -> None:
    done = completed([sys.executable, "-W", "always", "-c", CIRCLE, str(free_port())])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_shared_server_ends_with_its_last_store() -> None:
    first = TCPStore("localhost", 0, is_master=True, multi_tenant=True)
    second = TCPStore("localhost", first.port, is_master=True, multi_tenant=True)
    third = TCPStore("localhost", first.port, is_master=True, multi_tenant=True)
    first.set("key", "value")
    port = first.port
    first.close()
    first.close()
    del first
    del second
    assert third.get("key") == b"value"
    del third
    with pytest.raises(StoreConnectionError, match="within"):
        TCPStore("localhost", port, timeout=0.1)


def test_clones_do_not_keep_the_server_alive() -> None:
    store = TCPStore("localhost", 0, is_master=True)
    clone = store.clone()
    del store
    with pytest.raises(StoreConnectionError):
        clone.get("key")
    clone.close()


def test_threads_drop_stores_of_one_server() -> None:
    first = TCPStore("localhost", 0, is_master=True, multi_tenant=True)

    def use() -> None:
        for _ in range(20):
            TCPStore("localhost", first.port, is_master=True, multi_tenant=True).add("count", 1)

    at_once(*[use] * 4)
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
def test_a_process_ends_silently_with_open_objects(what: str, end: str) -> None:
    assert completed([sys.executable, "-c", f"{_IMPORTS}\n{what}\n{end}"], check=True).stderr == ""
