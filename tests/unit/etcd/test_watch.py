"""Watches: every change once and in order, whatever happens to members, and the ends of a watch."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import pytest

from rallypoint.control.etcd.api import Compare, Put, WatchCompacted, WatchEvent
from tests.busy_port import busy_port
from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster, Member
from tests.relay import Relay
from tests.unit.etcd.watching import TIMEOUT, Told


def write(client: EtcdClient, key: bytes, numbers: range) -> None:
    """Store each number exactly once, even if answers are lost."""
    for number in numbers:
        client.txn([Compare(key, "version", "==", number)], [Put(key, b"%d" % number)])


def test_changes_are_delivered_from_a_revision_on_and_together(client: EtcdClient, prefix: bytes) -> None:
    client.put(prefix + b"a", b"1")
    begin = client.put(prefix + b"a", b"2")
    told = Told()
    client.watch(prefix, begin, told.on_events, told.on_lost)
    client.delete(prefix + b"a")
    client.put(prefix[:-1], b"not below it")
    client.put(prefix + b"b", b"3")
    events = told.events(3)
    assert [(event.kind, event.kv.key, event.kv.value) for event in events] == [
        ("put", prefix + b"a", b"2"),
        ("delete", prefix + b"a", b""),
        ("put", prefix + b"b", b"3"),
    ]
    assert events[0].kv.mod_revision == begin
    assert told.silent
    batches: queue.SimpleQueue[Sequence[WatchEvent]] = queue.SimpleQueue()
    client.watch(prefix, client.range(prefix).revision + 1, batches.put, lambda lost: None)
    client.txn([], [Put(prefix + b"%d" % index, b"") for index in range(5)])
    assert len(batches.get(timeout=TIMEOUT)) == 5, "all changes of a revision at once"


@pytest.mark.parametrize("blow", ["kill", "pause"])
def test_a_watch_survives_the_loss_of_its_member(
    etcd: EtcdCluster, client: EtcdClient, prefix: bytes, used: Callable[[], Member], blow: str
) -> None:
    told = Told()
    client.watch(prefix, client.range(prefix).revision + 1, told.on_events, told.on_lost)
    write(client, prefix, range(5))
    lost = used()
    getattr(lost, blow)()
    other = EtcdClient([member.endpoint for member in etcd.members if member is not lost], timeout_s=20.0)
    write(other, prefix, range(5, 20))
    other.close()
    assert [event.kv.value for event in told.events(20)] == [b"%d" % number for number in range(20)]
    etcd.mend()
    write(client, prefix, range(20, 25))
    assert [event.kv.version for event in told.events(5)] == [21, 22, 23, 24, 25]
    assert told.silent


def test_a_watch_on_a_lost_connection_does_not_wait_for_a_silent_host(
    etcd: EtcdCluster, client: EtcdClient, prefix: bytes
) -> None:
    """The member's host went down without pending requests, and accepts no connection."""
    told = Told()
    with Relay(etcd.members[0].endpoint) as relay:
        other = EtcdClient([relay.endpoint], timeout_s=20.0)
        begin = other.range(prefix).revision + 1
    other._cluster._order.append(etcd.members[1].endpoint)
    with busy_port(*relay.endpoint):
        other.watch(prefix, begin, told.on_events, told.on_lost)
        client.put(prefix, b"1")
        assert told.event().kv.value == b"1"
        other.close()


def test_a_compacted_revision_ends_the_watch(client: EtcdClient, prefix: bytes) -> None:
    first = client.put(prefix, b"1")
    last = client.put(prefix, b"2")
    client.compact(last)
    told = Told()
    client.watch(prefix, first, told.on_events, told.on_lost)
    assert told.lost() == WatchCompacted(last)
    assert told.silent
    found = client.range(prefix, prefix=True)
    client.watch(prefix, found.revision + 1, told.on_events, told.on_lost)
    client.put(prefix, b"3")
    assert told.event().kv.value == b"3"


def test_changes_compacted_during_a_cut_are_not_skipped(
    etcd: EtcdCluster, client: EtcdClient, prefix: bytes, used: Callable[[], Member]
) -> None:
    told = Told()
    member = used()
    alone = EtcdClient([member.endpoint], timeout_s=20.0)
    alone.watch(prefix, alone.range(prefix).revision + 1, told.on_events, told.on_lost)
    client.put(prefix, b"1")
    assert told.event().kv.value == b"1"
    member.kill()
    client.put(prefix, b"2")
    last = client.put(prefix, b"3")
    client.compact(last)
    etcd.mend()
    first = told.next()
    if isinstance(first, WatchEvent):  # the member did not know of the compaction yet
        assert [first.kv.value, told.event().kv.value] == [b"2", b"3"]
    else:
        assert first == WatchCompacted(last)
    alone.close()


@pytest.mark.parametrize("by_callback", [False, True])
def test_a_closed_watch_delivers_nothing_more(client: EtcdClient, prefix: bytes, by_callback: bool) -> None:
    told, still = Told(), Told()
    begin = client.range(prefix).revision + 1

    def on_events(events: Sequence[WatchEvent]) -> None:
        told.on_events(events)
        if by_callback:
            watch.close()

    watch = client.watch(prefix, begin, on_events, told.on_lost)
    client.watch(prefix, begin, still.on_events, still.on_lost)
    client.put(prefix, b"1")
    assert told.event().kv.value == b"1"
    if not by_callback:
        watch.close()
        watch.close()
    client.put(prefix, b"2")
    still.events(2)
    assert told.silent


def test_a_failing_callback_costs_only_its_own_call(client: EtcdClient, prefix: bytes) -> None:
    told = Told()

    def on_events(events: Sequence[WatchEvent]) -> None:
        told.on_events(events)
        raise ValueError("a mistake of the caller's")

    client.watch(prefix, client.range(prefix).revision + 1, on_events, told.on_lost)
    write(client, prefix, range(3))
    assert [event.kv.value for event in told.events(3)] == [b"0", b"1", b"2"]
