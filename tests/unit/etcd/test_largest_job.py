"""The state of the largest job fits an etcd with its default limits."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping

from rallypoint.control.election.journal import Journal, PartWritten, Written, takeover_from
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.steps import Fence, Takeover
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
from rallypoint.control.protocol.ranges import MAX_NODES
from rallypoint.failures.cause import Cause
from tests.etcd_client import WritingClient as EtcdClient

LONGEST_HOST = 64
"""The longest name of a machine on Linux."""


def _text(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=size))


def _participants(rng: random.Random) -> Mapping[NodeId, Participant]:
    """Participants with names that compress badly."""
    found = {}
    for rank in range(MAX_NODES):
        address = f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}"
        node = NodeId(address, rng.randrange(1 << 22), rng.getrandbits(62), _text(rng, LONGEST_HOST))
        info = NodeInfo("default", 8, address, rng.randrange(30000, 60000), rank, 3, "/home/user/job/train.py")
        found[node] = Participant(info, rank, MAX_NODES - 1 - rank)
    return found


def _largest_state() -> State:
    """A state with everything at once; states of real jobs are smaller."""
    rng = random.Random(0)
    participants = _participants(rng)
    nodes = frozenset(participants)
    cause = Cause(0, 0, _text(rng, LONGEST_HOST), 42, 1, _text(rng, 8192), _text(rng, 32768), 0.0, "")
    return State(
        round=3,
        complete=True,
        participants=participants,
        succeeded=nodes,
        consents=nodes,
        quiet=nodes,
        ended=RoundEnd(2, Reason.FAILURE, "node", cause),
        verdict=Verdict(Outcome.FAILED, cause, _text(rng, 8192)),
    )


def test_the_largest_state_is_read_as_written(client: EtcdClient, prefix: bytes) -> None:
    keys, state = ElectionKeys.for_job(prefix.decode(), "job"), _largest_state()
    fence = Fence((keys.seat(0), client.put(keys.seat(0), b"")))
    journal = Journal(keys, fence, "me", Takeover("me", State(), 0, 0, 0))
    journal.append(1, state, 1)
    outcome: object = PartWritten()
    while outcome == PartWritten():
        write = journal.next_write()
        assert write is not None
        outcome = journal.on_answer(client.txn(write.compares, write.then, write.otherwise))
    assert outcome == Written(1)
    (stored,) = client.txn((), (Range(keys.state, prefix=True),)).ranges
    found = takeover_from(stored.kvs, (), "me", keys, Settings("job", 1, MAX_NODES))
    assert found.state == state
    client.delete(keys.root.encode(), prefix=True)
