"""Torch's clients on our server and ours on torch's: many at once, and all sizes. `unit/store` has each operation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.conformance.store_pairs import TIMEOUT, client, serving, torch_stores

pytestmark = pytest.mark.torch

PAIRS = [
    *(("torch", "compiled"), ("torch", "python"), ("ours", "torch")),
    *(("ours", "compiled"), ("ours", "python"), ("torch", "torch")),
]
"""Kinds of client and server. The last pair shows that the tests hold torch's own store to what they say."""


@pytest.fixture(name="pair", params=PAIRS, ids=[f"{ours}-client-{theirs}-server" for ours, theirs in PAIRS])
def _pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Two clients of the kind, the second a clone of the first."""
    kind, server = request.param
    with serving(server) as port:
        first = client(kind, port)
        yield first, first.clone()


def test_who_gives_up_at_a_barrier_has_come_all_the_same(pair: tuple[Any, Any]) -> None:
    one, two = pair
    with pytest.raises(RuntimeError, match=r"barrier|timeout"):
        one.barrier("c", 2, timedelta(milliseconds=50))
    two.barrier("c", 2, TIMEOUT)
    assert one.get("c") == b"2"


@pytest.mark.parametrize("size", [0, 1, 8 * 1024 * 1024])
def test_values_of_all_sizes(pair: tuple[Any, Any], size: int) -> None:
    one, two = pair
    value = bytes(size)
    one.set("k", value)
    assert two.get("k") == value
    assert [bytes(found) for found in two.multi_get(["k", "k"])] == [value, value]
    assert two.compare_set("k", value, value) == value
    one.queue_push("q", value)
    assert two.queue_pop("q") == value


def test_a_world_is_counted(pair: tuple[Any, Any]) -> None:
    one, _ = pair
    kind = "ours" if type(one).__module__.startswith("rallypoint") else "torch"
    client(kind, one.port, world_size=3)
    client(kind, one.port, world_size=3, wait_for_workers=False)
    assert one.num_keys() == 1
    assert one.list_keys() == []


def test_nested_prefixes_are_the_same_on_the_wire() -> None:
    from rallypoint.store.prefix import PrefixStore

    theirs = torch_stores().PrefixStore
    with serving("ours") as port:
        ours = client("ours", port)
        PrefixStore("outer", PrefixStore("pre", ours)).set("y", "v")
        torchs = client("torch", port)
        assert theirs("outer", theirs("pre", torchs)).get("y") == b"v"
        assert theirs("pre", torchs).list_keys() == PrefixStore("pre", ours).list_keys() == ["outer/y"]
        assert theirs("pre", torchs).num_keys() == PrefixStore("pre", ours).num_keys() == 1


@pytest.mark.parametrize(("kind", "server"), PAIRS[:3])
def test_64_clients_at_once(kind: str, server: str) -> None:
    """Each adds, publishes, waits for its neighbour's key and meets the others at a barrier."""
    world = 64

    def work(port: int, rank: int) -> bytes:
        store = client(kind, port, world_size=world)
        for _ in range(20):
            store.add("total", 1)
        store.set(f"rank{rank}", str(rank))
        store.barrier("all", world, TIMEOUT)
        found: bytes = store.get(f"rank{(rank + 1) % world}")
        return found

    with serving(server) as port, ThreadPoolExecutor(world) as threads:
        found = list(threads.map(lambda rank: work(port, rank), range(world)))
        assert found == [b"%d" % ((rank + 1) % world) for rank in range(world)]
        assert client(kind, port).add("total", 0) == 20 * world
