"""The state of the largest job fits an etcd with its default limits, in whatever condition the job is."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping

import pytest

from rallypoint.control.election.journal import Journal, PartWritten, Written
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.steps import Fence
from rallypoint.control.election.takeover import Takeover, takeover_from
from rallypoint.control.etcd.api import Range
from rallypoint.control.membership.state import (
    NodeId,
    NodeInfo,
    Outcome,
    Participant,
    Reason,
    RoundEnd,
    Settings,
    State,
    Verdict,
)
from rallypoint.control.protocol.validation import MAX_NODES
from rallypoint.failures.cause import Cause
from tests.etcd_client import WritingClient as EtcdClient

LONGEST_HOST = 64
"""Characters that Linux lets the name of a machine have."""


def _text(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=size))


def _participants(rng: random.Random) -> Mapping[NodeId, Participant]:
    """Of names that compress as badly as names can."""
    found = {}
    for rank in range(MAX_NODES):
        address = f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}"
        node = NodeId(address, rng.randrange(1 << 22), rng.getrandbits(62), _text(rng, LONGEST_HOST))
        info = NodeInfo("default", 8, address, rng.randrange(30000, 60000), rank, 3, "/home/user/job/train.py")
        found[node] = Participant(info, rank, MAX_NODES - 1 - rank)
    return found


@pytest.fixture(name="states", scope="module")
def _states() -> Mapping[str, State]:
    rng = random.Random(0)
    participants = _participants(rng)
    nodes = frozenset(participants)
    cause = Cause(0, 0, _text(rng, LONGEST_HOST), 42, 1, _text(rng, 8192), _text(rng, 32768), 0.0, "")
    ended = RoundEnd(3, Reason.FAILURE, "node", cause)
    running = State(round=3, complete=True, participants=participants)
    return {
        "forming": running._replace(complete=False, round=4, ended=ended),
        "succeeded": running._replace(succeeded=nodes, consents=nodes),
        "failed": running._replace(ended=ended, verdict=Verdict(Outcome.FAILED, cause, _text(rng, 8192))),
    }


@pytest.mark.parametrize("condition", ["forming", "succeeded", "failed"])
def test_it_is_written_and_read_back(
    client: EtcdClient, prefix: bytes, states: Mapping[str, State], condition: str
) -> None:
    keys = ElectionKeys.of(prefix.decode(), "job")
    fence = Fence((keys.seat(0), client.put(keys.seat(0), b"")))
    journal = Journal(keys, fence, "me", Takeover("me", State(), 0, 0, 0))
    journal.append(1, states[condition], 1)
    outcome: object = PartWritten()
    while outcome == PartWritten():
        write = journal.next_write()
        assert write is not None
        outcome = journal.answered(client.txn(write.compares, write.then, write.otherwise))
    assert outcome == Written(1)
    (stored,) = client.txn((), (Range(keys.state, prefix=True),)).ranges
    found = takeover_from(stored.kvs, (), "me", keys, Settings("job", 1, MAX_NODES))
    assert found.state == states[condition]
    client.delete(keys.root.encode(), prefix=True)
