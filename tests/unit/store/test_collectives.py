"""Operations of several workers over a store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from rallypoint.base.errors import UserError
from rallypoint.compat.helpers import create_c10d_store
from rallypoint.store.collectives import barrier, get_all, store_timeout, synchronize
from rallypoint.store.errors import StoreConnectionError, StoreError, StoreTimeoutError
from rallypoint.store.plain import HashStore

WORLD = 8
TIMEOUT = 120.0


def at_once(work: Callable[[int], object], ranks: range = range(WORLD)) -> list[object]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [future.result() for future in [threads.submit(work, rank) for rank in ranks]]


def test_store_timeout_restores_the_timeout() -> None:
    store = HashStore(5)
    with store_timeout(store, 7):
        assert store.timeout == timedelta(seconds=7)
    assert store.timeout == timedelta(seconds=5)
    with pytest.raises(StoreTimeoutError), store_timeout(store, 0.01):
        store.get("none")
    assert store.timeout == timedelta(seconds=5)


def test_synchronize() -> None:
    store = HashStore(5)
    given = [f"data{rank}".encode() for rank in range(WORLD)]
    found = at_once(lambda rank: synchronize(store.clone(), given[rank], rank, WORLD, "sync", TIMEOUT))
    assert found == [given] * WORLD
    assert set(store.list_keys()) == {
        *(f"sync{rank}" for rank in range(WORLD)),
        "sync/finished/num_members",
        "sync/finished/last_member",
    }
    with pytest.raises(StoreTimeoutError):
        synchronize(store, b"x", 0, 2, "alone", 0.05)
    assert store.timeout == timedelta(seconds=5)


def test_rank_0_reads_last() -> None:
    store = HashStore(0.05)
    store.multi_set(["k0", "k1"], [b"a", b"b"])
    with pytest.raises(StoreTimeoutError):
        get_all(store, 0, "k", 2)
    assert get_all(store, 1, "k", 2) == [b"a", b"b"]
    assert get_all(store, 0, "k", 2) == [b"a", b"b"]


def test_barrier() -> None:
    store = HashStore(5)
    with pytest.raises(StoreTimeoutError):
        barrier(store, 2, "b", 0.05)
    assert store.list_keys() == ["b/num_members"]
    store = HashStore(5)
    at_once(lambda rank: barrier(store.clone(), WORLD, "b", TIMEOUT, rank))
    assert sorted(store.list_keys()) == ["b/last_member", "b/num_members"]


def test_rank_0_names_missing_ranks() -> None:
    store = HashStore(5)

    def come(rank: int) -> StoreError | None:
        try:
            barrier(store.clone(), 5, "b", 0.1, rank, lambda number: f"host{number}", 2.0)
        except StoreError as error:
            return error
        return None

    first, second, third = at_once(come, range(3))
    assert "missing_ranks=[host3, host4], timeout=0.1" in str(first)
    assert isinstance(first, StoreTimeoutError)
    assert all("missing" not in str(error) for error in (second, third))
    assert store.check(["b/TRACING_GATE", "b2/TRACE"])


def test_at_most_sixteen_missing_ranks_are_named() -> None:
    with pytest.raises(StoreTimeoutError, match=r"missing_ranks=\[1, 2, .*, 15, 16\]"):
        barrier(HashStore(5), 40, "b", 0.05, 0, trace_timeout=0.05)


def test_create_c10d_store() -> None:
    with pytest.raises(StoreConnectionError, match="server_port=-1 is not a valid port"):
        create_c10d_store(False, "localhost")
    with pytest.raises(UserError, match="set server_port"):
        create_c10d_store(True, "localhost", world_size=2)
    server = create_c10d_store(True, "localhost", timeout=TIMEOUT, wait_for_workers=False)
    client = create_c10d_store(False, "localhost", server.port, timeout=TIMEOUT)
    client.set("k", "v")
    assert server.get("k") == b"v"
    client.close()
    server.close()
