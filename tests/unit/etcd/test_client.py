"""Requests of the client, against a real cluster in good health."""

from __future__ import annotations

import queue
import sys
import threading

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.errors import UserError
from rallypoint.control.etcd.api import (
    Compare,
    Delete,
    EtcdLeaseGone,
    EtcdPackageMissing,
    EtcdUnreachable,
    Put,
    Range,
)
from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster
from tests.processes import completed


def test_a_value_is_stored_changed_and_deleted(client: EtcdClient, prefix: bytes) -> None:
    key = prefix + b"k"
    first = client.put(key, b"one")
    second = client.put(key, b"")
    found = client.range(key)
    assert found.revision >= second > first
    (stored,) = found.kvs
    assert stored == (key, b"", first, second, 2, 0)
    assert client.delete(key) == 1
    assert client.delete(key) == 0
    assert client.range(key).kvs == ()


def test_a_prefix_has_what_begins_with_it_by_name(client: EtcdClient, prefix: bytes) -> None:
    for name in (b"b", b"a", b"a\xff", b"c"):
        client.put(prefix + name, name)
    client.put(prefix[:-1] + b"0", b"just behind it")
    assert [kv.value for kv in client.range(prefix, prefix=True).kvs] == [b"a", b"a\xff", b"b", b"c"]
    assert [kv.value for kv in client.range(prefix, prefix=True, limit=2).kvs] == [b"a", b"a\xff"]
    assert client.delete(prefix + b"a", prefix=True) == 2
    assert {kv.value for kv in client.range(b"", prefix=True).kvs} >= {b"b", b"c", b"just behind it"}


def test_a_transaction_does_one_side_or_the_other(client: EtcdClient, prefix: bytes) -> None:
    key, other = prefix + b"k", prefix + b"other"
    absent = [Compare(key, "create_revision", "==", 0)]
    made = client.txn(absent, [Put(key, b"v"), Range(key), Delete(other)], [Range(key)])
    assert made.succeeded
    assert [each.kvs[0].value for each in made.ranges] == [b"v"]
    again = client.txn(absent, [Put(key, b"w")], [Range(key)])
    assert not again.succeeded
    (found,) = again.ranges
    assert found.kvs[0].value == b"v"
    assert found.revision == made.revision


def test_every_field_can_be_compared_in_every_way(client: EtcdClient, prefix: bytes) -> None:
    key = prefix + b"k"
    lease = client.lease_grant(60)
    client.put(key, b"a")
    client.put(key, b"b", lease)
    (kv,) = client.range(key).kvs
    fields: list[Compare] = []
    for compare in (
        Compare(key, "create_revision", "==", kv.create_revision),
        Compare(key, "mod_revision", "==", kv.mod_revision),
        Compare(key, "version", "==", 2),
        Compare(key, "value", "==", b"b"),
        Compare(key, "lease", "==", lease),
    ):
        fields += [compare, compare._replace(relation="!="), compare._replace(relation="<")]
        fields.append(compare._replace(relation=">"))
    held = [client.txn([compare], []).succeeded for compare in fields]
    assert held == [True, False, False, False] * 5
    assert client.txn([Compare(key + b"/", "create_revision", "==", 0, prefix=True)], []).succeeded
    assert not client.txn([Compare(key, "create_revision", "==", 0, prefix=True)], []).succeeded
    assert client.txn([Compare(key, "version", ">", 1), Compare(key, "value", ">", b"a")], []).succeeded
    assert not client.txn([Compare(key, "version", "==", 2), Compare(key, "value", "<", b"a")], []).succeeded
    client.lease_revoke(lease)


def test_a_lease_keeps_its_keys_and_takes_them_with_it(client: EtcdClient, prefix: bytes) -> None:
    lease = client.lease_grant(60)
    assert lease > 0
    client.put(prefix + b"k", b"", lease)
    assert client.range(prefix + b"k").kvs[0].lease == lease
    assert client.lease_keep_alive(lease) == 60
    client.lease_revoke(lease)
    assert client.range(prefix + b"k").kvs == ()
    assert client.lease_keep_alive(lease) == 0
    client.lease_revoke(lease)
    with pytest.raises(EtcdLeaseGone, match="lease not found"):
        client.put(prefix + b"k", b"", lease)
    with pytest.raises(EtcdLeaseGone):
        client.txn([], [Put(prefix + b"k", b"", lease)])


def test_many_threads_use_one_client(client: EtcdClient, prefix: bytes) -> None:
    def write(index: int) -> None:
        for number in range(20):
            client.put(prefix + b"%d" % index, b"%d" % number)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(kv.value, kv.version) for kv in client.range(prefix, prefix=True).kvs] == [(b"19", 20)] * 8


def test_a_closed_client_says_so(etcd: EtcdCluster) -> None:
    client = EtcdClient(etcd.endpoints)
    client.range(b"?")
    client.close()
    client.close()
    with pytest.raises(EtcdUnreachable, match="closed"):
        client.range(b"?")


def test_whoever_still_asks_when_the_client_is_closed_is_told_at_once(etcd: EtcdCluster, prefix: bytes) -> None:
    client = EtcdClient(etcd.endpoints, timeout_s=60.0)
    client.range(prefix)
    for member in etcd.members:
        member.pause()
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    asking = threading.Event()

    def ask() -> None:
        asking.set()
        try:
            client.put(prefix, b"")
        except EtcdUnreachable as failure:
            failures.put(failure)

    thread = threading.Thread(target=ask)
    thread.start()
    asking.wait()
    client.close()
    assert "closed" in str(failures.get(timeout=30))
    thread.join()


def test_no_endpoint_is_a_mistake() -> None:
    with pytest.raises(UserError, match="no etcd endpoint"):
        EtcdClient([])


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpclib", None)
    with pytest.raises(EtcdPackageMissing, match=r"pip install grpclib"):
        EtcdClient([Endpoint("localhost", 2379)])


@pytest.mark.process
def test_what_others_import_of_it_brings_nothing_heavy() -> None:
    script = (
        "import sys, rallypoint.control.etcd.api, rallypoint.control.etcd.client; "
        "print([name for name in ('asyncio', 'ssl', 'h2', 'grpclib') if name in sys.modules])"
    )
    done = completed([sys.executable, "-c", script], check=True)
    assert done.stdout == "[]\n"
