"""Agents exchange their addresses over a store of torch's, as a third party's rendezvous may provide it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.processes import completed

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


def exchange_over(kind: str) -> None:
    """Two agents of one round exchange records. Where torch is imported, stores of a rendezvous become torch's."""
    import torch.distributed as dist

    from rallypoint.store.plain import HashStore
    from tests.unit.agent.features import finish
    from tests.unit.agent.test_peer_exchange import User, entered, exchanging
    from tests.unit.agent.third_party import CountingHandler

    is_hash = kind == "HashStore"
    store = dist.HashStore() if is_hash else dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True))
    users = [User(0, 1), User(0, 1)]
    exchanges = [exchanging(user) for user in users]
    for rank, peers in enumerate(exchanges):
        group = entered(rank, 2, 1, lambda: CountingHandler(HashStore(), "job", 2))
        group.store = store
        peers.begin(group)
    for peers in exchanges:
        finish(peers)
        assert not peers.failure
        peers.close()
    assert [sorted(user.taken) for user in users] == [[0, 1], [0, 1]]
    print("exchanged")


@pytest.mark.parametrize("kind", ["HashStore", "TCPStore"])
def test_over_a_store_of_torchs(kind: str) -> None:
    program = f"from tests.conformance.test_peer_exchange import exchange_over; exchange_over({kind!r})"
    done = completed([sys.executable, "-c", program], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "exchanged\n"), done.stderr
