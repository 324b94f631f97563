"""A client continues when members die or fall silent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.control.etcd.api import Compare, EtcdUnreachable, Put
from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster, Member
from tests.ports import free_port


def test_a_new_client_skips_silent_and_dead_members(etcd: EtcdCluster, prefix: bytes) -> None:
    nobody = Endpoint("127.0.0.1", free_port())
    etcd.members[0].pause()
    for _ in range(4):  # each begins with a member at random
        client = EtcdClient([etcd.members[0].endpoint, nobody, etcd.members[1].endpoint], timeout_s=20.0)
        client.put(prefix, b"")
        assert client.connected_to == etcd.members[1].endpoint
        client.close()


def test_requests_are_sent_again_and_done_once(
    etcd: EtcdCluster, client: EtcdClient, prefix: bytes, used: Callable[[], Member]
) -> None:
    member = used()
    member.pause()
    assert client.txn([Compare(prefix, "version", "==", 0)], [Put(prefix, b"v")]).succeeded
    assert client.connected_to != member.endpoint
    etcd.mend()
    assert client.range(prefix).kvs[0].version == 1
    used().pause()
    lease = client.lease_grant(60)
    assert client.lease_keep_alive(lease) == 60
    client.lease_revoke(lease)


def test_the_deadline_holds_when_all_members_are_silent(etcd: EtcdCluster, prefix: bytes) -> None:
    client = EtcdClient(etcd.endpoints, timeout_s=2.0)
    client.range(prefix)
    for member in etcd.members:
        member.pause()
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(
            EtcdUnreachable, match=r"did not answer within 2 s \(127.0.0.1:\d+ (has been silent|did not)"
        ):
            client.range(prefix)
        assert time.monotonic() - begun < 20, "the deadline of other clients"
    client.close()


def test_requests_wait_for_a_quorum(etcd: EtcdCluster, client: EtcdClient, prefix: bytes) -> None:
    client.put(prefix, b"before")
    survivor = etcd.leader()
    for member in etcd.members:
        if member is not survivor:
            member.kill()
    with pytest.raises(EtcdUnreachable, match=str(survivor.endpoint)):
        client.range(prefix, timeout_s=3.0)
    etcd.mend()
    assert client.range(prefix).kvs[0].value == b"before"


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", ".*Connection refused"), ("no-such-host.invalid", "")])
def test_an_unreachable_endpoint_is_named(host: str, why: str) -> None:
    where = Endpoint(host, free_port())
    client = EtcdClient([where], timeout_s=0.5)
    with pytest.raises(EtcdUnreachable, match=f"{where}{why}"):
        client.put(b"k", b"")
    client.close()


def test_pauses_between_attempts_grow() -> None:
    attempts = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            nonlocal attempts
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return
                attempts += 1

        refusing = threading.Thread(target=refuse)
        refusing.start()
        client = EtcdClient([Endpoint("127.0.0.1", listener.getsockname()[1])], timeout_s=3.0)
        with pytest.raises(EtcdUnreachable):
            client.range(b"key")
        client.close()
        listener.shutdown(socket.SHUT_RDWR)
        refusing.join()
    assert attempts <= 20, "each attempt is two connections: the second is asked what is wrong"


def test_all_threads_get_answers_while_members_fail(
    etcd: EtcdCluster, client: EtcdClient, prefix: bytes, used: Callable[[], Member]
) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    counts = [0] * 4

    def count(index: int) -> None:
        key = prefix + b"%d" % index
        try:
            while not stop.is_set():
                client.txn([Compare(key, "version", "==", counts[index])], [Put(key, b"")], timeout_s=60.0)
                counts[index] += 1
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=count, args=(index,)) for index in range(len(counts))]
    for thread in threads:
        thread.start()
    member = used()
    member.pause()
    client.range(prefix)
    etcd.mend()
    etcd.leader().kill()
    client.range(prefix)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert [kv.version for kv in client.range(prefix, prefix=True).kvs] == counts
