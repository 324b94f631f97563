"""Requests of the client to a healthy real cluster."""

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


def test_a_prefix_selects_keys_in_order(client: EtcdClient, prefix: bytes) -> None:
    for name in (b"b", b"a", b"a\xff", b"c"):
        client.put(prefix + name, name)
    client.put(prefix[:-1] + b"0", b"just behind it")
    assert [kv.value for kv in client.range(prefix, prefix=True).kvs] == [b"a", b"a\xff", b"b", b"c"]
    assert [kv.value for kv in client.range(prefix, prefix=True, limit=2).kvs] == [b"a", b"a\xff"]
    assert client.delete(prefix + b"a", prefix=True) == 2
    assert {kv.value for kv in client.range(b"", prefix=True).kvs} >= {b"b", b"c", b"just behind it"}


def test_a_transaction_runs_one_branch(client: EtcdClient, prefix: bytes) -> None:
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


def test_all_comparisons(client: EtcdClient, prefix: bytes) -> None:
    key = prefix + b"k"
    lease = client.lease_grant(60)
    client.put(key, b"a")
    client.put(key, b"b", lease)
    (kv,) = client.range(key).kvs
    for compare in (
        Compare(key, "create_revision", "==", kv.create_revision),
        Compare(key, "mod_revision", "==", kv.mod_revision),
        Compare(key, "version", "==", 2),
        Compare(key, "value", "==", b"b"),
        Compare(key, "lease", "==", lease),
    ):
        variants = [compare, *(compare._replace(relation=relation) for relation in ("!=", "<", ">"))]
        assert [client.txn([variant], []).succeeded for variant in variants] == [True, False, False, False]
    for compares, holds in (
        ([Compare(key + b"/", "create_revision", "==", 0, prefix=True)], True),
        ([Compare(key, "create_revision", "==", 0, prefix=True)], False),
        ([Compare(key, "version", ">", 1), Compare(key, "value", ">", b"a")], True),
        ([Compare(key, "version", "==", 2), Compare(key, "value", "<", b"a")], False),
    ):
        assert client.txn(compares, []).succeeded == holds
    client.lease_revoke(lease)


def test_keys_end_with_their_lease(client: EtcdClient, prefix: bytes) -> None:
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


def test_a_closed_client_refuses_pending_and_later_requests(etcd: EtcdCluster, prefix: bytes) -> None:
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
    client.close()
    assert "closed" in str(failures.get(timeout=30))
    thread.join()
    with pytest.raises(EtcdUnreachable, match="closed"):
        client.range(prefix)


def test_a_client_needs_an_endpoint_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no etcd endpoint is set"):
        EtcdClient([])
    monkeypatch.setitem(sys.modules, "grpclib", None)
    with pytest.raises(EtcdPackageMissing, match=r"pip install grpclib"):
        EtcdClient([Endpoint("localhost", 2379)])


@pytest.mark.process
def test_importing_the_client_imports_nothing_heavy() -> None:
    script = (
        "import sys, rallypoint.control.etcd.api, rallypoint.control.etcd.client; "
        "print([name for name in ('asyncio', 'ssl', 'h2', 'grpclib') if name in sys.modules])"
    )
    done = completed([sys.executable, "-c", script], check=True)
    assert done.stdout == "[]\n"
