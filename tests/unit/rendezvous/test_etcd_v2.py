"""The backend `etcd-v2` against a real etcd: compare and set, changes that are told, and etcds that fail or refuse."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, listening_socket
from rallypoint.base.errors import UserError
from rallypoint.etcd.api import EtcdRefused, EtcdUnreachable
from rallypoint.protocol.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from rallypoint.rendezvous.backends import etcd_v2
from rallypoint.rendezvous.backends.etcd_options import endpoints_of
from rallypoint.rendezvous.backends.etcd_v2 import EtcdV2Backend, client_of
from rallypoint.rendezvous.backends.etcd_v2_http import EtcdV2Client
from rallypoint.rendezvous.params import RendezvousParameters
from tests.etcd_cluster import EtcdCluster, running
from tests.ports import free_port
from tests.relay import Relay

TIMEOUT = 120.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(tmp_path_factory.mktemp("etcd"), 1, arguments=["--enable-v2"]) as cluster:
        yield cluster


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A run id that no other test uses."""
    return str(request.node.name).replace("/", "-")


@contextmanager
def backend(*endpoints: Endpoint, key: str, ttl: int = 7200, timeout: float | None = None) -> Iterator[EtcdV2Backend]:
    deadline = None if timeout is None else Deadline.after(timeout)
    made = EtcdV2Backend(EtcdV2Client(endpoints), key, ttl=ttl, deadline=deadline)
    with closing(made):
        yield made


@contextmanager
def watching(watched: EtcdV2Backend) -> Iterator[list[float]]:
    """The moments at which a backend tells of a change, as its link would hear of them."""
    told: list[float] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            if watched.wait_for_change(0.5):
                told.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        watched.cancel_waits()
        thread.join(TIMEOUT)
    assert not thread.is_alive()


def until(holds: object, what: str) -> None:
    assert callable(holds)
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def once_a_leader_is_there(one: EtcdV2Backend, state: bytes, token: object) -> tuple[bytes, int, bool]:
    """Set a state after a loss that may have been the leader's: until there is another, no member has an answer."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            written = one.set_state(state, token)
        except RendezvousConnectionError:
            assert time.monotonic() < deadline, "no leader was elected"
        else:
            assert written is not None
            assert written[0] == state
            return written


# What is stored


@pytest.mark.process
def test_a_state_is_replaced_only_by_who_knows_it(etcd: EtcdCluster, key: str) -> None:
    with backend(*etcd.endpoints, key=key) as one, backend(*etcd.endpoints, key=key) as two:
        assert one.get_state() is None
        first = one.set_state(b"first")
        assert first is not None
        assert (first[0], first[2]) == (b"first", True)
        assert two.get_state() == first[:2]
        assert two.set_state(b"other") == (*first[:2], False), "somebody was there already"
        second = two.set_state(b"second", first[1])
        assert second is not None
        assert second[2]
        assert one.set_state(b"late", first[1]) == (*second[:2], False)
        assert one.set_state(b"late", "no token of etcd's") == (*second[:2], False)
        assert one.get_state() == second[:2]


def test_a_token_for_nothing_is_refused(etcd: EtcdCluster, key: str) -> None:
    with backend(*etcd.endpoints, key=key) as one:
        assert one.set_state(b"x", "no token of etcd's") is None
        with pytest.raises(RendezvousStateError, match="is gone"):
            one.set_state(b"x", 12345)


def test_any_bytes_and_any_run_id(etcd: EtcdCluster) -> None:
    with backend(*etcd.endpoints, key="é ?#%2f&=+/job") as one:
        data = bytes(range(256)) * 200
        written = one.set_state(data)
        assert written is not None
        assert one.get_state() == (data, written[1])


def test_each_write_lengthens_the_life_of_a_state(etcd: EtcdCluster, key: str) -> None:
    (member,) = etcd.endpoints

    def left() -> int:
        """Seconds of its life that are left, as etcd says."""
        with urlopen(f"http://{member}/v2/keys/torch/elastic/rendezvous/{key}", timeout=TIMEOUT) as answer:
            return int(json.load(answer)["node"]["ttl"])

    with backend(member, key=key, ttl=600) as one:
        written = one.set_state(b"0")
        assert written is not None
        assert left() <= 600
        until = time.monotonic() + TIMEOUT
        while (before := left()) > 598:
            assert time.monotonic() < until
            time.sleep(0.1)
        written = one.set_state(b"1", written[1])
        assert written is not None
        assert written[2]
        assert before < left() <= 600


def test_a_state_that_is_lost_is_not_begun_anew(etcd: EtcdCluster, key: str) -> None:
    other = EtcdV2Client(etcd.endpoints)
    with backend(*etcd.endpoints, key=key) as one, closing(other):
        written = one.set_state(b"state")
        assert written is not None
        path = f"/torch/elastic/rendezvous/{key}"
        assert other.delete(path)
        for attempt in (one.get_state, lambda: one.set_state(b"next", written[1])):
            with pytest.raises(RendezvousStateError, match=f"{path!r} is gone"):
                attempt()


@pytest.mark.parametrize(("there", "said"), [("~~~", "holds '~~~', which is no"), (None, "is a directory and no")])
def test_what_is_no_state_is_named(etcd: EtcdCluster, key: str, there: str | None, said: str) -> None:
    other = EtcdV2Client(etcd.endpoints)
    path = f"/torch/elastic/rendezvous/{key}"
    with backend(*etcd.endpoints, key=key) as one, closing(other):
        other.put(path if there is not None else f"{path}/below", there or "x")
        with pytest.raises(RendezvousStateError, match=said):
            one.get_state()


def test_an_answer_that_was_lost(etcd: EtcdCluster, key: str) -> None:
    """The write is sent again, refused since it had been done, and known as ours by what is there."""
    with Relay(etcd.endpoints[0]) as relay, backend(relay.endpoint, key=key) as one:
        assert one.get_state() is None
        relay.swallow_next_answer()
        written = one.set_state(b"mine")
        assert written is not None
        assert (written[0], written[2]) == (b"mine", True)
        relay.swallow_next_answer()
        assert one.get_state() == written[:2]


# What is told


def test_a_change_of_another_is_told_at_once_and_our_own_is_not(etcd: EtcdCluster, key: str) -> None:
    with backend(*etcd.endpoints, key=key) as one, backend(*etcd.endpoints, key=key) as two:
        assert one.get_state() is None
        with watching(one) as told:
            written = two.set_state(b"two")
            until(lambda: told, "a change was not told")
            assert written is not None
            for count in range(20):
                assert one.get_state() == written[:2]
                written = one.set_state(str(count).encode(), written[1])
                assert written is not None
            so_far = len(told)
            two.set_state(b"two again", written[1])
            until(lambda: len(told) > so_far, "a second change was not told")
        # A change of our own may be told before we have its answer; mostly it is not, and never twice.
        assert so_far <= 21


def test_nothing_is_told_before_the_first_read_nor_without_a_change(etcd: EtcdCluster, key: str) -> None:
    with backend(*etcd.endpoints, key=key) as one:
        assert not one.wait_for_change(0.05)
        one.get_state()
        assert not one.wait_for_change(0.05)
        assert not one.wait_for_change(0.05)


def test_a_wait_ends_when_somebody_is_in_a_hurry(etcd: EtcdCluster, key: str) -> None:
    with backend(*etcd.endpoints, key=key) as one:
        one.get_state()
        threading.Timer(0.2, one.cancel_waits).start()
        began = time.monotonic()
        assert not one.wait_for_change(TIMEOUT)
        assert time.monotonic() - began < TIMEOUT / 2


def test_changes_are_told_also_when_etcd_has_forgotten_the_index(etcd: EtcdCluster, key: str) -> None:
    other = EtcdV2Client(etcd.endpoints)
    with backend(*etcd.endpoints, key=key) as one, backend(*etcd.endpoints, key=key) as two, closing(other):
        assert one.get_state() is None
        two.set_state(b"two")
        for count in range(1100):  # etcd remembers a thousand
            other.put("/elsewhere", str(count))
        assert one.wait_for_change(TIMEOUT)
        found = one.get_state()
        assert found is not None
        written = two.set_state(b"more", found[1])
        assert written is not None
        assert one.wait_for_change(TIMEOUT)
        assert one.get_state() == written[:2]


@pytest.mark.process
def test_etcd_is_started_again(etcd: EtcdCluster, key: str) -> None:
    member = etcd.members[0]
    with backend(*etcd.endpoints, key=key) as one, backend(*etcd.endpoints, key=key) as two:
        written = one.set_state(b"before")
        assert written is not None
        two.get_state()
        with watching(two) as told:
            member.kill()
            with pytest.raises(RendezvousConnectionError, match=f"no etcd answers at {member.endpoint}"):
                one.get_state()
            with pytest.raises(RendezvousConnectionError):
                one.set_state(b"lost", written[1])
            member.start()
            member.wait_ready()
            assert one.get_state() == written[:2]
            so_far = len(told)
            assert one.set_state(b"after", written[1]) is not None
            until(lambda: len(told) > so_far, "a change after the start was not told")


# Several members


@pytest.mark.process
@pytest.mark.etcd
def test_a_member_that_is_dead_paused_or_wrong_is_passed_over(tmp_path: Path, key: str) -> None:
    with (
        running(tmp_path, 3, arguments=["--enable-v2"]) as cluster,
        backend(*cluster.endpoints, key=key) as one,
        backend(*cluster.endpoints[::-1], key=key) as two,
    ):
        written = one.set_state(b"0")
        assert written is not None
        two.get_state()
        with watching(two) as told:
            cluster.members[0].pause()
            began = time.monotonic()
            written = one.set_state(b"1", written[1])
            assert time.monotonic() - began < TIMEOUT / 2
            assert written is not None
            assert written[2]
            until(lambda: told, "a change was not told")
            cluster.members[0].resume()
            cluster.members[2].kill()  # which is the one that `two` asks
            assert two.get_state() == written[:2]
            so_far = len(told)
            written = once_a_leader_is_there(one, b"2", written[1])
            until(lambda: len(told) > so_far, "a change after the loss of the member was not told")
        assert two.get_state() == written[:2]
        with listening_socket("127.0.0.1", 0) as nobody:
            wrong = Endpoint("127.0.0.1", nobody.getsockname()[1])
            with backend(wrong, cluster.endpoints[0], key=key) as three:
                assert three.get_state() == written[:2]


# No etcd, or none that serves us


@pytest.mark.process
@pytest.mark.etcd
def test_an_etcd_that_comes_late_is_waited_for(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, 1, arguments=["--enable-v2"]) as cluster:
        member = cluster.members[0]
        member.kill()
        with backend(member.endpoint, key=key, timeout=60) as one:
            threading.Timer(1.5, member.start).start()
            assert one.get_state() is None
        member.wait_ready()
    assert caplog.text.count("trying again for another") == 1


def test_an_etcd_that_takes_the_connection_and_is_silent_is_told_of_soon(
    key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first attempt has come to nothing."""
    monkeypatch.setattr(etcd_v2, "_TELL_FIRST", 0.1)
    with listening_socket("127.0.0.1", 0) as silent:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1])
        client = EtcdV2Client([endpoint], timeout=5.0)
        made = EtcdV2Backend(client, key, deadline=Deadline.after(3.0))
        with closing(made), pytest.raises(RendezvousError, match="before the join deadline"):
            made.get_state()
    assert caplog.messages == [f"no etcd has answered at {endpoint} yet; check --rdzv-endpoint"]


@pytest.mark.process
@pytest.mark.etcd
def test_a_cluster_without_a_quorum_is_waited_for(tmp_path: Path, key: str) -> None:
    with running(tmp_path, 3, arguments=["--enable-v2"]) as cluster:
        first, *others = cluster.members
        for member in others:
            member.kill()
        said = f"etcd at {first.endpoint} .*has not answered before the join"
        with backend(first.endpoint, key=key, timeout=1.0) as one, pytest.raises(RendezvousError, match=said):
            one.get_state()
        with backend(first.endpoint, key=key, timeout=60) as one:
            for member in others:
                threading.Timer(1.0, member.start).start()
            assert one.get_state() is None
            assert one.set_state(b"state") is not None
        for member in others:
            member.wait_ready()


def test_an_etcd_that_does_not_come_is_waited_for_until_the_deadline(key: str) -> None:
    port = free_port()
    with backend(Endpoint("127.0.0.1", port), key=key, timeout=1.2) as one:
        began = time.monotonic()
        with pytest.raises(RendezvousError, match=f"no etcd answers at 127.0.0.1:{port} .Connection refused.; it has"):
            one.get_state()
        assert 1.0 < time.monotonic() - began < TIMEOUT


def test_who_is_in_a_hurry_does_not_wait_for_an_etcd(key: str) -> None:
    with backend(Endpoint("127.0.0.1", free_port()), key=key, timeout=TIMEOUT) as one:
        threading.Timer(0.2, one.cancel_waits).start()
        began = time.monotonic()
        with pytest.raises(RendezvousConnectionError):
            one.get_state()
        assert time.monotonic() - began < TIMEOUT / 2


@pytest.mark.process
@pytest.mark.etcd
def test_an_etcd_without_the_v2_api(tmp_path: Path, key: str) -> None:
    with running(tmp_path, 1) as cluster, backend(*cluster.endpoints, key=key, timeout=TIMEOUT) as one:
        with pytest.raises(RendezvousError, match="has no v2 API of etcd: use --rdzv-backend=etcd") as caught:
            one.get_state()
        assert not isinstance(caught.value, RendezvousConnectionError), "waiting cannot help"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer as etcd does"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "is not etcd: it answers with status 200 and 'hello'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "is not etcd"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "is not etcd: it answers with status 302"),
        *(
            (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body), "is not etcd")
            for body in (
                b'{"errorCode": 1e999}',
                b'{"errorCode": 0}',
                b'{"errorCode": "x"}',
                b'{"node": []}',
                b'{"node": {"modifiedIndex": 1e999}}',
                b'{"node": {"value": 1}}',
                b'{"node": {"nodes": [1]}}',
                b'{"node": ' + 100 * b'{"nodes": [' + b"{}" + 100 * b"]}" + b"}",
                b'{"node": {}, "index": []}',
                100_000 * b"[",
            )
        ),
    ],
)
def test_something_else_at_the_endpoint(answer: bytes, said: str) -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        listener.setblocking(True)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        client = EtcdV2Client([Endpoint("127.0.0.1", listener.getsockname()[1])])
        with closing(client), pytest.raises(EtcdRefused, match=said):
            client.get("/x")
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_something_at_the_endpoint_that_says_nothing() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        client = EtcdV2Client([Endpoint("127.0.0.1", listener.getsockname()[1])], timeout=0.2)
        with closing(client), pytest.raises(EtcdUnreachable, match="does not answer"):
            client.get("/x")


def test_an_etcd_that_cannot_answer_now_may_later() -> None:
    """As a member does while the cluster has no leader."""
    with listening_socket("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        body = b'{"errorCode":301,"message":"During Leader Election","cause":"","index":7}'

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                connection.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        client = EtcdV2Client([Endpoint("127.0.0.1", listener.getsockname()[1])])
        with closing(client), pytest.raises(EtcdUnreachable, match=r"cannot answer now .During Leader Election"):
            client.get("/x")
        thread.join(TIMEOUT)


# Options


def parameters(config: dict[str, str]) -> RendezvousParameters:
    return RendezvousParameters("etcd-v2", "", "job", 1, 2, None, **config)


def test_endpoints() -> None:
    assert endpoints_of("") == [Endpoint("localhost", 2379)]
    assert endpoints_of("a, b:1,[::1]:2") == [Endpoint("a", 2379), Endpoint("b", 1), Endpoint("::1", 2)]
    with pytest.raises(UserError, match="port 'x'"):
        endpoints_of("a:1,b:x")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"protocol": "ftp"}, "protocol='ftp' is unknown; choose http or https"),
        ({"protocol": "http", "ca_cert": "/x"}, "protocol=http uses no certificates"),
        ({"ssl_cert_key": "/x"}, "key='/x' is the key of no certificate"),
        ({"ca_cert": "/nowhere"}, "the CA certificates in '/nowhere' cannot be used"),
        ({"ssl_cert": "/nowhere"}, "the certificate and key in /nowhere cannot be used"),
        ({"password": "secret"}, "password is given without a user"),
        ({"read_timeout": "0"}, "read_timeout=0 must be positive"),
        ({"read_timeout": "soon"}, "read_timeout='soon' is not a whole number"),
    ],
)
def test_options_that_cannot_work(config: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        client_of(parameters(config))
    assert "secret" not in str(caught.value)


def test_a_backend_needs_a_run_id_and_a_life() -> None:
    client = EtcdV2Client([Endpoint("localhost", 1)])
    with pytest.raises(UserError, match="run id must not be empty"):
        EtcdV2Backend(client, "")
    with pytest.raises(UserError, match="keeps for 0 s cannot be"):
        EtcdV2Backend(client, "job", ttl=0)
