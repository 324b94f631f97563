"""The coordinator's state on its way into a real etcd."""

from __future__ import annotations

import queue

import pytest

from rallypoint.control.election.journal import Journal
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.shell import JournalWriter
from rallypoint.control.election.steps import Fence
from rallypoint.control.election.takeover import Takeover
from rallypoint.control.etcd.api import RangeResult
from rallypoint.control.membership.state import State
from tests.etcd_client import WritingClient as EtcdClient

TIMEOUT = 120.0


class Writer:
    """A coordinator's memory, and what comes of what it is to keep."""

    def __init__(self, client: EtcdClient, keys: ElectionKeys, number: int, stored: RangeResult) -> None:
        self.key = keys.node(number)
        self.came: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        fence = Fence((self.key, client.put(self.key, b"", 0)))
        revision = stored.kvs[0].mod_revision if stored.kvs else 0
        takeover = Takeover("the-coordinator", State(), len(stored.kvs), revision, lease=0)
        journal = Journal(keys, fence, "the-coordinator", takeover)
        self.writer = JournalWriter(client, journal, self.came.put)
        self.writer.start(self.came.put)

    def keeps(self, number: int, state: State) -> int | str:
        """The number that is kept, or why that cannot be."""
        self.writer.append(number, state)
        return self.came.get(timeout=TIMEOUT)


@pytest.fixture(name="keys")
def _keys(prefix: bytes) -> ElectionKeys:
    return ElectionKeys.of(prefix.decode(), "job")


def test_the_same_state_that_the_next_one_has_written_is_not_our_own_write(
    client: EtcdClient, keys: ElectionKeys
) -> None:
    """Both heard of the same thing; the next one goes by our name and counts on from our number."""
    first = Writer(client, keys, 1, client.range(keys.state))
    assert first.keeps(1, State(round=1)) == 1
    client.delete(first.key)
    second = Writer(client, keys, 2, client.range(keys.state))
    try:
        assert second.keeps(1, State(round=2)) == 1
        assert first.keeps(2, State(round=2)) == "another agent is the coordinator now"
        assert second.keeps(2, State(round=3)) == 2
    finally:
        first.writer.close()
        second.writer.close()
