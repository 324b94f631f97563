"""The exchange of ranks over the store of a round, compared with the arithmetic without a store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.agent.third_party import exchange, exchange_ranks, exit_barrier
from rallypoint.control.membership.rules import assign_worker_ranks
from rallypoint.control.membership.state import NodeRanks
from rallypoint.store.api import Store
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreTimeoutError
from rallypoint.store.filestore import FileStore
from rallypoint.store.plain import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.server import StoreServer
from tests.effort import examples

NODES = st.lists(st.tuples(st.sampled_from(["A", "B"]), st.integers(1, 4)), min_size=1, max_size=5)
Found = TypeVar("Found")


def side_by_side(nodes: int, node: Callable[[int], Found]) -> list[Found]:
    """Run all nodes at once, the last rank first; returns their results by rank."""
    found: dict[int, Found] = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: node(rank)})) for rank in range(nodes)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[rank] for rank in range(nodes)]


def exchanged(nodes: list[tuple[str, int]], store: HashStore) -> list[NodeRanks]:
    return side_by_side(len(nodes), lambda rank: exchange_ranks(store, rank, len(nodes), *nodes[rank]))


@settings(max_examples=examples(30), deadline=None)
@given(NODES)
def test_ranks_are_as_calculated(nodes: list[tuple[str, int]]) -> None:
    assert exchanged(nodes, HashStore(timeout=30)) == assign_worker_ranks(nodes)


def test_keys_and_values_follow_the_contract() -> None:
    """Section 3.2: agents of both kinds can share such a round."""
    store = HashStore(timeout=30)
    exchanged([("A", 1), ("B", 2), ("A", 2)], store)
    assert json.loads(store.get("torchelastic/role_info/1")) == {"role": "B", "rank": 1, "local_world_size": 2}
    assert json.loads(store.get("torchelastic/assigned_ranks/2")) == [3, 5, 1, 3]


def test_exit_barrier_waits_for_the_last_node() -> None:
    store = HashStore(timeout=30)
    with pytest.raises(StoreTimeoutError):
        exit_barrier(store, 2, 0.05)
    exit_barrier(store, 2, 30)
    assert store.get("torchelastic/agent/terminal_state/num_members") == b"2"
    assert store.check(["torchelastic/agent/terminal_state/last_member"])


@pytest.fixture(params=["tcp", "file", "hash"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens another connection to one store."""
    shared = HashStore(timeout=30)
    with StoreServer("127.0.0.1") as server, ExitStack() as stack:
        openers: dict[str, Callable[[], Store]] = {
            "tcp": lambda: stack.enter_context(TCPStore("127.0.0.1", server.port)),
            "file": lambda: FileStore(str(tmp_path / "store"), -1),
            "hash": lambda: shared,
        }
        yield openers[request.param]


def agreed(stores: list[Store], proposals: list[int]) -> list[int]:
    size = len(proposals)
    return side_by_side(size, lambda rank: exchange(stores[rank], rank, size, "A", 1, proposals[rank])[1])


def test_all_nodes_get_the_largest_number_of_restarts(open_store: Callable[[], Store]) -> None:
    """A new node proposes 0; the others propose more than in any round that they know."""
    stores = [open_store() for _ in range(3)]
    for round_, proposals in enumerate([[0, 0, 0], [1, 0, 1], [0, 2, 0], [0, 0, 3]]):
        prefixed: list[Store] = [PrefixStore(f"round/{round_}", store) for store in stores]
        assert agreed(prefixed, proposals) == [round_] * 3


def test_numbers_do_not_repeat_over_a_shared_store(open_store: Callable[[], Store]) -> None:
    """The keys of earlier rounds are still in the store."""
    stores = [open_store() for _ in range(2)]
    for count in range(4):
        assert agreed(stores, [count, count]) == [count, count]


@pytest.mark.parametrize("ours", [0, 1])
def test_beside_an_agent_of_torch_the_own_number_counts(ours: int) -> None:
    store = HashStore(timeout=30)

    def node(rank: int) -> int:
        if rank == ours:
            return exchange(store, rank, 2, "A", 1, 5)[1]
        exchange_ranks(store, rank, 2, "A", 1)
        return -1

    assert side_by_side(2, node)[ours] == 5


def test_identical_workers_exchange_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    store = HashStore(timeout=0)
    assert exchange(store, 2, 3, "A", 4, 7) == (NodeRanks(8, 12, 8, 12), 7)
    assert store.num_keys() == 0
