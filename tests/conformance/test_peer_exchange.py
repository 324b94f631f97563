"""Agents tell each other where they are over a store of torch's, which a third party's rendezvous may give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from rallypoint.agent.preparations.peer_exchange import PeerExchange
from rallypoint.store.hashstore import HashStore
from tests.unit.agent.test_peer_exchange import User, entered, finish
from tests.unit.agent.third_party import CountingHandler

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "make",
    [dist.HashStore, lambda: dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True))],
    ids=["HashStore", "TCPStore"],
)
def test_over_a_store_of_torchs(make: Callable[[], Any]) -> None:
    store = make()
    users = [User(0, 1), User(0, 1)]
    exchanges = [PeerExchange([user]) for user in users]
    for rank, peers in enumerate(exchanges):
        group = entered(rank, 2, 1, lambda: CountingHandler(HashStore(), "job", 2))
        group.store = store
        peers.begin(group)
    for peers in exchanges:
        finish(peers)
        assert not peers.failure
        peers.close()
    assert [sorted(user.taken) for user in users] == [[0, 1], [0, 1]]
