"""Stores that are dropped without a word, and stores that cannot be."""

import gc
import json
import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.utils.distributed import create_c10d_store, get_free_port

KINDS = (ValueError, RuntimeError, LookupError, OSError)


def server(port: int, multi_tenant: bool = False) -> Any:
    return TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        timeout=timedelta(seconds=20),
    )


def is_served(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), 20).close()
    except ConnectionRefusedError:
        return False
    return True


def kinds(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return [kind.__name__ for kind in KINDS if isinstance(error, kind)]


def dropped() -> list[Any]:
    told = []
    store = server(0)
    port = store.port
    store.set("key", "value")
    del store
    gc.collect()
    told.append(is_served(port))
    server(port).set("key", "again, on the same port")
    first = server(0, multi_tenant=True)
    port = first.port
    second = server(port, multi_tenant=True)
    second.set("key", "value")
    del first
    gc.collect()
    told.append(second.get("key").decode())
    del second
    gc.collect()
    told.append(is_served(port))
    port = get_free_port()
    backend, store = create_backend(RendezvousParameters("c10d", f"localhost:{port}", "job", 1, 1))
    told.append(backend.set_state(b"state")[2])
    del backend, store
    gc.collect()
    told.append(is_served(port))
    return told


def opened() -> list[Any]:
    taken = server(0)
    told = [
        kinds(lambda: create_c10d_store(True, "localhost", world_size=2, timeout=1)),
        kinds(lambda: create_c10d_store(True, "localhost", world_size=2, timeout=1, wait_for_workers=False)),
        kinds(lambda: create_c10d_store(False, "localhost", world_size=2, timeout=1)),
        kinds(lambda: create_c10d_store(False, "localhost", timeout=1)),
        kinds(lambda: create_c10d_store(True, "localhost", taken.port, timeout=1)),
        kinds(lambda: create_c10d_store(True, "localhost", get_free_port(), world_size=2, timeout=1)),
        kinds(lambda: server(taken.port, multi_tenant=True)),
        kinds(lambda: create_c10d_store(True, "localhost").libuvBackend),
        kinds(lambda: create_c10d_store(True, "localhost", use_libuv=False).libuvBackend),
        kinds(lambda: create_c10d_store(True, "localhost").num_keys()),
        kinds(lambda: sorted(create_c10d_store(True, "localhost").list_keys())),
    ]
    os.environ["USE_LIBUV"] = "0"
    return [*told, create_c10d_store(True, "localhost").libuvBackend, server(0).libuvBackend]


print(json.dumps([dropped(), opened()]))
