"""The exchange of ranks over a round's store, against the arithmetic that needs no store."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.agent.exchange import exchange_ranks, exit_barrier
from rallypoint.ranks.assign import NodeRanks, assign_worker_ranks
from rallypoint.store.errors import StoreTimeoutError
from rallypoint.store.hashstore import HashStore

NODES = st.lists(st.tuples(st.sampled_from(["A", "B"]), st.integers(1, 4)), min_size=1, max_size=5)


def exchanged(nodes: list[tuple[str, int]], store: HashStore) -> list[NodeRanks]:
    found: dict[int, NodeRanks] = {}

    def node(rank: int, role: str, size: int) -> None:
        found[rank] = exchange_ranks(store, rank, len(nodes), role, size)

    threads = [threading.Thread(target=node, args=(rank, *each)) for rank, each in enumerate(nodes)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(len(nodes))]


@settings(max_examples=30, deadline=None)
@given(NODES)
def test_as_the_arithmetic_says(nodes: list[tuple[str, int]]) -> None:
    assert exchanged(nodes, HashStore(timeout=30)) == assign_worker_ranks(nodes)


def test_keys_and_values_are_those_of_the_contract() -> None:
    """Section 3.2: agents of both kinds can share such a round."""
    store = HashStore(timeout=30)
    exchanged([("A", 1), ("B", 2), ("A", 2)], store)
    assert json.loads(store.get("torchelastic/role_info/1")) == {"role": "B", "rank": 1, "local_world_size": 2}
    assert json.loads(store.get("torchelastic/assigned_ranks/2")) == [3, 5, 1, 3]


def test_identical_workers_need_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    store = HashStore(timeout=0)
    assert exchange_ranks(store, 2, 3, "A", 4) == NodeRanks(8, 12, 8, 12)
    assert store.num_keys() == 0


def test_a_node_that_says_nothing() -> None:
    with pytest.raises(StoreTimeoutError):
        exchange_ranks(HashStore(timeout=0.05), 0, 2, "A", 1)


def test_the_barrier_opens_for_the_last_and_not_before() -> None:
    store = HashStore(timeout=30)
    with pytest.raises(StoreTimeoutError):
        exit_barrier(store, 2, 0.05)
    exit_barrier(store, 2, 30)
    assert store.get("torchelastic/agent/terminal_state/num_members") == b"2"
    assert store.check(["torchelastic/agent/terminal_state/last_member"])
