"""`etcd-v2` where etcd wants TLS, certificates, or a user and password; right ones and wrong ones."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from rallypoint.base.endpoint import Endpoint
from rallypoint.etcd.api import EtcdRefused, EtcdUnreachable
from rallypoint.protocol.errors import RendezvousConnectionError, RendezvousError
from rallypoint.rendezvous.backends.etcd_v2 import EtcdV2Backend, client_of
from rallypoint.rendezvous.params import RendezvousParameters
from tests.etcd_cluster import EtcdCluster, ServerTls, running

pytestmark = [pytest.mark.process, pytest.mark.etcd]

TIMEOUT = 120.0


class Files(NamedTuple):
    """PEM files: an authority, what it has issued, and those of another authority."""

    ca: str
    cert: str
    key: str
    both: str
    other_ca: str
    other_both: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    other.cert_pem.write_to_path(str(folder / "other-ca.pem"))
    mine, strange = ca.issue_cert("127.0.0.1", "localhost"), other.issue_cert("127.0.0.1")
    mine.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    mine.private_key_pem.write_to_path(str(folder / "key.pem"))
    mine.private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
    strange.private_key_and_cert_chain_pem.write_to_path(str(folder / "other-both.pem"))
    names = ("ca.pem", "cert.pem", "key.pem", "both.pem", "other-ca.pem", "other-both.pem")
    return Files(*(str(folder / name) for name in names))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[EtcdCluster]:
    tls = ServerTls(Path(files.ca), Path(files.cert), Path(files.key))
    with running(tmp_path_factory.mktemp("secure"), 1, tls=tls, arguments=["--enable-v2"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(tmp_path_factory.mktemp("plain"), 1, arguments=["--enable-v2"]) as cluster:
        yield cluster


def parameters(endpoint: Endpoint | str, config: dict[str, str]) -> RendezvousParameters:
    return RendezvousParameters("etcd-v2", str(endpoint), "job", 1, 2, None, **config)


def refusal(endpoint: Endpoint | str, config: dict[str, str]) -> str:
    with closing(client_of(parameters(endpoint, config))) as client, pytest.raises(EtcdRefused) as caught:
        client.get("/x")
    return str(caught.value)


def test_over_tls(secure: EtcdCluster, files: Files) -> None:
    spellings: list[dict[str, str]] = [
        {"protocol": "https", "ca_cert": files.ca, "ssl_cert": files.cert, "ssl_cert_key": files.key},
        {"cacert": files.ca, "cert": files.cert, "key": files.key},
        {"ca_cert": files.ca, "ssl_cert": files.both},
    ]
    for number, config in enumerate(spellings):
        one, two = (EtcdV2Backend(client_of(parameters(secure.endpoints[0], config)), str(number)) for _ in range(2))
        with closing(one), closing(two):
            assert one.get_state() is None
            assert not one.wait_for_change(0.05)
            written = two.set_state(b"two")
            assert written is not None
            assert one.wait_for_change(TIMEOUT)
            assert one.get_state() == written[:2]
            assert not one.wait_for_change(0.05)
            began = time.monotonic()
            one.cancel_waits()
            assert not one.wait_for_change(TIMEOUT)
            assert time.monotonic() - began < TIMEOUT / 2


def test_a_wrong_authority_or_certificate(secure: EtcdCluster, plain: EtcdCluster, files: Files) -> None:
    (place,) = secure.endpoints
    assert "cannot be trusted" in refusal(place, {"ca_cert": files.other_ca, "ssl_cert": files.both})
    assert "cannot be trusted" in refusal(place, {"protocol": "https"})
    assert "does not accept this node's certificate" in refusal(place, {"ca_cert": files.ca})
    strange = {"ca_cert": files.ca, "ssl_cert": files.other_both}
    assert "does not accept this node's certificate" in refusal(place, strange)


def test_tls_to_an_etcd_without_it_and_the_other_way_round(
    secure: EtcdCluster, plain: EtcdCluster, files: Files
) -> None:
    """Both disconnect without a word, as does an etcd that is just going: so it is said, and may be tried again."""
    for cluster, config, said in (
        (secure, {}, "closes the connection without an answer; if it speaks only TLS, give protocol=https"),
        (plain, {"ca_cert": files.ca}, "does not answer TLS; if it speaks none, give protocol=http"),
    ):
        client = client_of(parameters(cluster.endpoints[0], config))
        with closing(client), pytest.raises(EtcdUnreachable, match=said):
            client.get("/x")


def test_one_wrong_member_of_several(secure: EtcdCluster, plain: EtcdCluster, files: Files) -> None:
    config = {"ca_cert": files.ca, "ssl_cert": files.both}
    places = f"{plain.endpoints[0]},{secure.endpoints[0]}"
    with closing(EtcdV2Backend(client_of(parameters(places, config)), "several")) as backend:
        assert backend.get_state() is None
        assert backend.set_state(b"x") is not None
    untrusted = refusal(f"{secure.endpoints[0]},localhost:{secure.endpoints[0].port}", {"ca_cert": files.other_ca})
    assert untrusted.count("cannot be trusted") == 2


def call(place: Endpoint, method: str, path: str, body: object = None) -> int:
    connection = http.client.HTTPConnection(place.host, place.port, timeout=10)
    with closing(connection):
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status


def test_a_user_and_a_password(tmp_path: Path) -> None:
    with running(tmp_path, 1, arguments=["--enable-v2"]) as cluster:
        (place,) = cluster.endpoints
        assert call(place, "PUT", "/v2/auth/users/root", {"user": "root", "password": "sesame"}) == 201
        assert call(place, "PUT", "/v2/auth/enable") == 200
        right = {"user": "root", "password": "sesame"}
        with closing(EtcdV2Backend(client_of(parameters(place, right)), "users")) as backend:
            assert backend.get_state() is None
            assert backend.set_state(b"x") is not None
            assert not backend.wait_for_change(0.05)
        for wrong in ({"user": "root", "password": "wrong"}, {"user": "nobody"}):
            said = refusal(place, wrong)
            assert "give the options user and password" in said
            assert "wrong" not in said
            with closing(EtcdV2Backend(client_of(parameters(place, wrong)), "users")) as backend:
                with pytest.raises(RendezvousError) as caught:
                    backend.get_state()
                assert not isinstance(caught.value, RendezvousConnectionError), "waiting cannot help"
