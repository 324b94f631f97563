"""TLS, users and passwords, and the error message of each impossible set-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from rallypoint.base.endpoint import Endpoint, listening_socket
from rallypoint.base.errors import UserError
from rallypoint.control.etcd.api import Credentials, EtcdError, EtcdRefused, EtcdTls, EtcdUnreachable, WatchCancelled
from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster, ServerTls, running
from tests.unit.etcd.watching import Told

JOB = Credentials("job", "its-password")
TOKEN_LIFE_S = 1
OURS = ("ca.pem", "client.pem", "client.key")


class Secured:
    """A cluster with TLS and users, whose tokens live for a second, and the files for its clients."""

    def __init__(self, cluster: EtcdCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.tls = EtcdTls(*map(self.file, OURS))

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def client(self, tls: EtcdTls | None, credentials: Credentials | None, timeout_s: float = 20.0) -> EtcdClient:
        return EtcdClient(self.cluster.endpoints, tls, credentials, timeout_s)


def issue(ca: trustme.CA, folder: Path, name: str, *identities: str) -> None:
    made = ca.issue_cert(*identities, common_name=name)
    made.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    made.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))


@pytest.fixture(name="secured", scope="module")
def _secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    other.cert_pem.write_to_path(str(folder / "other-ca.pem"))
    issue(ca, folder, "server", "127.0.0.1")
    issue(ca, folder, "client", "agent.example")
    issue(other, folder, "other", "agent.example")
    files = ServerTls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    with running(folder, 3, tls=files, arguments=[f"--auth-token-ttl={TOKEN_LIFE_S}"]) as cluster:
        cluster.enable_auth({JOB.user: JOB.password})
        yield Secured(cluster, folder)


@pytest.fixture(name="insider")
def _insider(secured: Secured) -> Iterator[EtcdClient]:
    client = secured.client(secured.tls, JOB)
    yield client
    client.close()
    secured.cluster.mend()


def refusal(client: EtcdClient) -> str:
    """Why the client is refused, before its deadline."""
    with pytest.raises(EtcdRefused) as caught:
        client.put(b"k", b"")
    client.close()
    return str(caught.value)


def forget_tokens(secured: Secured) -> None:
    """Set the same password, which drops all tokens of the user."""
    as_root = "--user=root:root-password"
    secured.cluster.ctl(as_root, "user", "passwd", JOB.user, "--interactive=false", told=JOB.password)


def let_tokens_age(secured: Secured) -> None:
    """Wait until unused tokens expire."""
    time.sleep(TOKEN_LIFE_S + 2)


@pytest.mark.parametrize("lose_tokens", [forget_tokens, let_tokens_age])
def test_an_expired_token_is_replaced(
    secured: Secured, insider: EtcdClient, prefix: bytes, lose_tokens: Callable[[Secured], None]
) -> None:
    """Each client replaces its own: one first asks for a watch, one writes, and one asks for a lease."""
    told, late = Told(), Told()
    writer, lender = (secured.client(secured.tls, JOB) for _ in range(2))
    begin = insider.put(prefix, b"1")
    for client in (writer, lender):
        assert client.range(prefix).kvs[0].value == b"1"
    members = [client.connected_to for client in (insider, writer, lender)]
    insider.watch(prefix, begin, told.on_events, told.on_lost)
    assert told.event().kv.value == b"1"
    lose_tokens(secured)
    insider.watch(prefix, begin, late.on_events, late.on_lost)
    assert late.event().kv.value == b"1"
    writer.put(prefix, b"2")
    assert told.event().kv.value == late.event().kv.value == b"2"
    lease = lender.lease_grant(60)
    assert lender.lease_keep_alive(lease) == 60
    lender.lease_revoke(lease)
    assert [client.connected_to for client in (insider, writer, lender)] == members
    for client in (writer, lender):
        client.close()


def test_clients_log_in_again_after_a_restart_of_the_cluster(
    secured: Secured, insider: EtcdClient, prefix: bytes
) -> None:
    told = Told()
    insider.watch(prefix, insider.put(prefix, b"1"), told.on_events, told.on_lost)
    told.event()
    for member in secured.cluster.members:
        member.kill()
    secured.cluster.mend()
    insider.put(prefix, b"2")
    assert told.event().kv.value == b"2"


@pytest.mark.parametrize(
    ("files", "credentials", "said"),
    [
        (OURS, JOB._replace(password="another"), "invalid user ID or password'; check user and password"),
        (OURS, None, "set a user and a password"),
        (("other-ca.pem", *OURS[1:]), JOB, "certificate that cannot be trusted"),
        (("ca.pem", None, None), JOB, "`cert`"),
        (("ca.pem", "other.pem", "other.key"), JOB, "TLS"),
    ],
    ids=["wrong password", "no user", "wrong ca", "no certificate", "certificate of another authority"],
)
def test_refused_clients_get_the_reason(
    secured: Secured, files: tuple[str | None, ...], credentials: Credentials | None, said: str
) -> None:
    tls = EtcdTls(*(name and secured.file(name) for name in files))
    assert said in refusal(secured.client(tls, credentials))


def test_a_user_without_permissions(secured: Secured, prefix: bytes) -> None:
    nobody = Credentials("nobody", "x")
    secured.cluster.ctl("--user=root:root-password", "user", "add", ":".join(nobody))
    assert "permission denied'; grant the user" in refusal(secured.client(secured.tls, nobody))
    client = secured.client(secured.tls, nobody)
    told = Told()
    client.watch(prefix, 1, told.on_events, told.on_lost)
    lost = told.lost()
    assert isinstance(lost, WatchCancelled)
    assert "permission denied'; grant the user" in lost.reason
    client.close()


def test_tls_and_passwords_that_do_not_fit(etcd: EtcdCluster, secured: Secured, prefix: bytes) -> None:
    client = secured.client(None, JOB, timeout_s=1.0)
    with pytest.raises(EtcdUnreachable, match="check whether it requires TLS"):
        client.range(b"k")
    client.close()
    client = EtcdClient(etcd.endpoints, secured.tls, timeout_s=1.0)
    with pytest.raises(EtcdError, match="TLS"):
        client.range(b"k")
    client.close()
    client = EtcdClient(etcd.endpoints, credentials=JOB)  # it has no users
    client.put(prefix, b"v")
    client.close()
    assert JOB.password not in repr(JOB)


def test_another_service_at_the_endpoint(etcd: EtcdCluster) -> None:
    client = EtcdClient([Endpoint("127.0.0.1", etcd.members[0].metrics_port)])
    assert "HTTP/1, not the v3 API of etcd; check the endpoint" in refusal(client)
    with listening_socket("127.0.0.1", 0) as silent:
        where = Endpoint("127.0.0.1", silent.getsockname()[1])
        client = EtcdClient([where], timeout_s=1.5)
        with pytest.raises(EtcdUnreachable, match=f"{where} did not answer"):
            client.range(b"k")
        client.close()


@pytest.mark.parametrize(
    ("tls", "problem"),
    [
        (EtcdTls("missing.pem"), "`cacert` missing.pem cannot be used"),
        (EtcdTls(None, "missing.pem"), "`cert` missing.pem cannot be used"),
        (EtcdTls(None, None, "some.key"), "a key .*some.key.* is set without a certificate"),
        (EtcdTls(__file__), "`cacert` .*test_secured.py cannot be used"),
        (EtcdTls(None, "client.pem", "other.key"), r"key.*cannot be used \(key values mismatch\)"),
    ],
)
def test_unusable_files(secured: Secured, tls: EtcdTls, problem: str) -> None:
    if tls.key == "other.key":
        tls = EtcdTls(None, secured.file("client.pem"), secured.file("other.key"))
    with pytest.raises(UserError, match=problem):
        secured.client(tls, None)
