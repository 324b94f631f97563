"""Sessions over TLS: admitted and refused peers, and the messages to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest
import trustme

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.tls import ControlTls, TlsFiles
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.membership.state import NodeId, NodeInfo, Settings
from rallypoint.control.protocol.handshake import ClientHandshake
from rallypoint.control.protocol.messages import JoinRequest, LinkLost, Notification, Placed
from rallypoint.store.client import TCPStore
from rallypoint.store.server import RoundStores
from tests.unit.coordinator.sockets import TIMEOUT, Heard, SocketNode, linked, serving

JOB = Settings("job", 1, 1, join_timeout=TIMEOUT)


class Authority:
    """Signs certificates, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self._made = 0

    def files(self, *names: str, peer: str = "") -> TlsFiles:
        self._made += 1
        folder = self._folder / f"{id(self)}-{self._made}"
        folder.mkdir()
        made = TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem"), peer)
        certificate = self._ca.issue_cert(*names)
        certificate.private_key_pem.write_to_path(made.key)
        certificate.cert_chain_pems[0].write_to_path(made.cert)
        self._ca.cert_pem.write_to_path(made.ca)
        return made


@pytest.fixture(name="authority")
def _authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def served(tls: ControlTls | None) -> Iterator[Endpoint]:
    with serving(Dispatcher(JOB), tls=tls) as server:
        yield Endpoint("127.0.0.1", server.port)


def joined(endpoint: Endpoint, tls: ControlTls | None) -> Notification:
    """The first notification of a node that joins."""
    told = Heard()
    with linked(endpoint.port, JOB, told.take, tls=tls) as link:
        link.send(JoinRequest(NodeInfo("default", 1, "", 7000), TIMEOUT))
        return told.get(timeout=TIMEOUT)


@contextmanager
def greeting(endpoint: Endpoint, tls: ControlTls) -> Iterator[socket.socket]:
    """A node's connection after its part of the TLS handshake."""
    with (
        socket.create_connection(endpoint, TIMEOUT) as raw,
        tls.for_node().wrap_socket(raw, server_hostname="127.0.0.1") as node,
    ):
        yield node


def test_a_tls_server_sends_nothing_in_plain_text(authority: Authority) -> None:
    tls = ControlTls(authority.files("127.0.0.1"))
    with served(tls) as endpoint, socket.create_connection(endpoint) as raw:
        raw.settimeout(TIMEOUT)
        raw.sendall(b"\x16\x03\x01\x00\x05hello")
        answer = raw.recv(1000)
        assert b"rally" not in answer.lower()
        assert answer[:1] == b"\x15"  # TLS's own alert


def test_a_slow_tls_handshake_does_not_delay_others(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    own, nodes = ControlTls(authority.files("127.0.0.1")), ControlTls(authority.files("127.0.0.1"))
    calls, blocked, proceed = count(), threading.Event(), threading.Event()

    def objection_to(_certificate: object) -> None:
        if next(calls) == 0:
            blocked.set()
            assert proceed.wait(TIMEOUT)

    monkeypatch.setattr(own, "objection_to", objection_to)
    with served(own) as endpoint, greeting(endpoint, nodes):
        assert blocked.wait(TIMEOUT)
        assert isinstance(joined(endpoint, nodes), Placed)
        proceed.set()


def test_a_tls_handshake_that_waits_for_the_server_gets_its_time_back(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, nodes = ControlTls(authority.files("127.0.0.1")), ControlTls(authority.files("127.0.0.1"))
    proceed = threading.Event()
    monkeypatch.setattr(own, "objection_to", lambda _certificate: proceed.wait(TIMEOUT) and None)
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT", 0.1)
    with served(own) as endpoint, greeting(endpoint, nodes) as node:
        for _ in range(2):
            with socket.create_connection(endpoint, TIMEOUT) as silent:
                assert silent.recv(1) == b"", "others run out of time, and so did this one"
        monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT", 3600.0)
        proceed.set()
        SocketNode(node).greets(ClientHandshake(JOB.run_id, None, b"n", JOB).hello("h", NodeId("h", 1, 7)))


def loses(endpoint: Endpoint, tls: ControlTls | None) -> str:
    lost = joined(endpoint, tls)
    assert isinstance(lost, LinkLost), lost
    return lost.detail


def test_both_sides_refuse_a_certificate_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    others = Authority(tmp_path)
    with served(ControlTls(authority.files("127.0.0.1"))) as endpoint:
        assert "its certificate is not accepted" in loses(endpoint, ControlTls(others.files("node1")))
        forged = others.files("node1")._replace(ca=authority.files("node1").ca)
        assert "does not accept our certificate" in loses(endpoint, ControlTls(forged))


def test_a_certificate_names_the_host_or_the_expected_peer(authority: Authority) -> None:
    with served(ControlTls(authority.files("node0"))) as endpoint:
        assert "not accepted" in loses(endpoint, ControlTls(authority.files("node1")))
        assert "names node0, not" in loses(endpoint, ControlTls(authority.files("node1", peer="ctl")))
        assert isinstance(joined(endpoint, ControlTls(authority.files("node1", peer="node0"))), Placed)
    with served(ControlTls(authority.files("127.0.0.1", peer="node1"))) as endpoint:
        assert isinstance(joined(endpoint, ControlTls(authority.files("node1"))), Placed)
    with served(ControlTls(authority.files("127.0.0.1", peer="node1"))) as endpoint:
        assert "names node2, not node1" in loses(endpoint, ControlTls(authority.files("node2")))


def test_plain_and_tls_peers_explain_the_mismatch(authority: Authority) -> None:
    tls = ControlTls(authority.files("127.0.0.1"))
    with served(tls) as endpoint:
        assert "accepts only TLS; set tls_cert" in loses(endpoint, None)
    with served(None) as endpoint:
        assert "does not use TLS" in loses(endpoint, tls)


def test_workers_of_a_static_job_need_no_certificate(authority: Authority) -> None:
    stores, tls = RoundStores(), ControlTls(authority.files("127.0.0.1"))
    with serving(Dispatcher(JOB), tls=tls, fallback=stores.add_connection) as server, closing(stores):
        endpoint = Endpoint("127.0.0.1", server.port)
        assert isinstance(joined(endpoint, ControlTls(authority.files("node1"))), Placed)
        store = TCPStore("127.0.0.1", server.port)
        store.set("key", b"value")
        assert store.get("key") == b"value"
        store.close()
