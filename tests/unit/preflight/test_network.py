"""Checks of names, the endpoint, clocks and proxies."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.clusters.preflight import network
from rallypoint.clusters.preflight.dialing import Attempt, DialOutcome, LookUp
from rallypoint.clusters.preflight.network import Answer, EndpointProbe
from rallypoint.clusters.preflight.results import CheckInputs, CheckResult, Status
from tests.unit.preflight.test_machine import status

NODE = Endpoint("node1", 29400)
FOUND = LookUp(("10.0.0.1",), took=0.01)


def test_own_name_of_a_single_node() -> None:
    (found,) = network.own_name(CheckInputs(max_nodes=1))
    assert found.status is Status.SKIP


def place(*attempts: Attempt, here: bool = False, took: float = 0.01) -> EndpointProbe:
    return EndpointProbe(NODE, LookUp(tuple(attempt.address for attempt in attempts), took=took), attempts, here)


OPEN, CLOSED = Attempt("10.0.0.1", DialOutcome.ACCEPTED), Attempt("10.0.0.1", DialOutcome.REFUSED, "Connection refused")
SILENT, LOST = Attempt("10.0.0.2", DialOutcome.SILENT), Attempt("10.0.0.2", DialOutcome.UNREACHABLE, "No route to host")
NO_IPV6 = Attempt("fd00::1", DialOutcome.NO_ROUTE, "Network is unreachable")
UNKNOWN = EndpointProbe(NODE, LookUp(error="Name or service not known"))


SELF, ETCD = "node7", {"is_ours": False}


def clock(offset: float | None, uncertainty: float = 0.0) -> Answer:
    return Answer(offset=offset, uncertainty=uncertainty)


JUDGED: dict[Callable[..., CheckResult], list[tuple[tuple[Any, ...], dict[str, bool], list[str], str]]] = {
    network.judge_host_name: [
        ((SELF, FOUND, []), {}, [SELF, "10.0.0.1"], "PASS"),
        ((SELF, FOUND._replace(took=1.99), []), {}, [SELF], "PASS"),
        ((SELF, FOUND._replace(took=2.0), []), {}, [SELF, "2.0 s"], "WARN"),
        ((SELF, LookUp(("127.0.1.1", "::1")), []), {}, [SELF, "127.0.1.1", "loopback"], "WARN"),
        ((SELF, LookUp(("127.0.1.1", "10.0.0.1")), []), {}, [SELF], "PASS"),
        ((SELF, LookUp(error="Name or service not known"), []), {}, [SELF, "(Name or service not known)"], "WARN"),
        ((SELF, LookUp(took=6.0), []), {}, [SELF, "6 s"], "WARN"),
        ((SELF, FOUND, ["10.0.0.1"]), {}, [SELF, "not an address of this machine"], "WARN"),
    ],
    network.judge_endpoint: [
        (([],), {}, [], "SKIP"),
        (([place(OPEN)],), {}, ["node1:29400", "10.0.0.1"], "PASS"),
        (([place(CLOSED, here=True)],), {}, ["(this machine)"], "PASS"),
        (([place(SILENT)],), {}, ["10.0.0.2"], "FAIL"),
        (([place(LOST)],), {}, ["10.0.0.2", "(No route to host)"], "FAIL"),
        (([place(NO_IPV6)],), {}, ["fd00::1", "(Network is unreachable)"], "FAIL"),
        (([place(OPEN, NO_IPV6)],), {}, ["10.0.0.1"], "PASS"),
        (([place(OPEN, LOST)],), {}, ["10.0.0.1", "10.0.0.2"], "WARN"),
        (([place(OPEN, took=2.0)],), {}, ["2.0 s"], "WARN"),
        (([UNKNOWN],), {}, ["node1"], "FAIL"),
        (([EndpointProbe(NODE, LookUp(took=6.0))],), {}, ["node1", "6 s"], "FAIL"),
        (([place(OPEN), place(OPEN)],), {}, [], "PASS"),
        (([place(OPEN), place(LOST)],), {}, ["No route to host"], "WARN"),
        (([place(LOST), place(SILENT)],), {}, ["No route to host"], "FAIL"),
        # etcd must be running before
        (([place(OPEN), place(OPEN)],), ETCD, [], "PASS"),
        (([place(OPEN), place(CLOSED)],), ETCD, ["etcd"], "WARN"),
        (([place(CLOSED), place(CLOSED)],), ETCD, ["etcd"], "FAIL"),
        (([place(OPEN, CLOSED)],), ETCD, [], "PASS"),
        # A joining node waits for names and etcd: on Kubernetes, a pod's name appears with the pod.
        (([UNKNOWN],), {"joins": True}, [], "WARN"),
        (([place(CLOSED)],), {**ETCD, "joins": True}, [], "WARN"),
        (([place(LOST)],), {"joins": True}, [], "FAIL"),
    ],
    network.judge_clock: [
        ((clock(None),), {}, [], "SKIP"),
        ((clock(0.999),), {}, ["0.999 s ahead of"], "PASS"),
        ((clock(1.0),), {}, [], "WARN"),
        ((clock(-1.5, 0.1),), {}, ["1.500 s behind", "0.100 s"], "WARN"),
        ((clock(3.0, 2.5),), {}, ["2.500 s"], "PASS"),
        ((clock(299.0),), {}, [], "WARN"),
        ((clock(-300.0),), {}, [], "FAIL"),
    ],
    network.judge_port: [
        ((29400, "", (29401, 60999), []), {}, ["29400"], "PASS"),
        ((29400, "", (20000, 29399), []), {}, ["29400"], "PASS"),
        ((29400, "", (29400, 29400), []), {}, ["29400"], "WARN"),
        ((29400, "", (20000, 60999), [(1, 1), (29390, 29400)]), {}, ["29400"], "PASS"),
        ((29400, "Address already in use", (1, 2), []), {}, ["29400", "Address already in use"], "FAIL"),
    ],
}


@pytest.mark.parametrize(
    ("judge", "arguments", "options", "values", "expected"),
    [(judge, *row) for judge, rows in JUDGED.items() for row in rows],
    ids=[f"{judge.__name__}-{number}" for judge, rows in JUDGED.items() for number in range(len(rows))],
)
def test_judges(
    judge: Callable[..., CheckResult],
    arguments: tuple[Any, ...],
    options: dict[str, bool],
    values: list[str],
    expected: str,
) -> None:
    assert status(judge(*arguments, **options), *values) == expected
    found = place(OPEN)._replace(endpoint=Endpoint("10.0.0.1", 29400))
    assert network.judge_endpoint([found]).fact.count("10.0.0.1") == 1


def test_judge_control_plane() -> None:
    assert network.judge_control_plane(Answer(welcome="it answers")).status == "PASS"
    assert network.judge_control_plane(Answer(absent="nobody yet")).status == "SKIP"
    assert network.judge_control_plane(Answer()).status == "SKIP"
    refused = network.judge_control_plane(Answer(refusal="a sentence with its remedy"))
    assert (refused.status, refused.fact, refused.remedy) == ("FAIL", "a sentence with its remedy", "")


def test_the_port_of_the_control_plane() -> None:
    def found(port: int, backend: str) -> str:
        _, _, result, _ = network.endpoint(CheckInputs(endpoints=(("127.0.0.1", port),), backend=backend))
        return result.status

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as taken:
        listening, outgoing = server.getsockname()[1], taken.getsockname()[1]
        assert found(listening, "c10d") == "PASS", "another check asks the listener"
        assert found(outgoing, "c10d") == "FAIL", "used by an outgoing connection"
        assert found(outgoing, "etcd") == "SKIP"


@pytest.mark.parametrize(
    ("host", "spared", "is_spared"),
    [
        *(("node1", "node2, NODE1", True), ("node1.", "node1", True), ("node1", "*", True)),
        *(("node1", "", False), ("node10", "node1", False), ("node1", ".", False)),
        *(("node1.cluster.local", spared, True) for spared in ("cluster.local", ".cluster.local", "*.cluster.local")),
        ("node1.mycluster.local", "cluster.local", False),
        *(("10.0.0.1", "10.0.0.1", True), ("10.0.0.1", "10.0.0.0/8", True), ("fd00::1", "fd00::/8", True)),
        *(("10.0.0.1", spared, False) for spared in ("192.168.0.0/16,x", "0.0.1")),
        ("fd00::1", "10.0.0.0/8", False),
    ],
)
def test_is_spared(host: str, spared: str, is_spared: bool) -> None:
    assert network.is_spared(host, spared) is is_spared


@pytest.mark.parametrize(
    ("environ", "hosts", "values", "expected"),
    [
        ({"http_proxy": ""}, ["node1"], [], "PASS"),
        ({"http_proxy": "http://p"}, [], ["http_proxy"], "SKIP"),
        ({"http_proxy": "http://me:secret@p"}, ["node1"], ["http_proxy", "node1"], "WARN"),
        ({"HTTPS_PROXY": "http://p"}, ["node1"], ["HTTPS_PROXY", "node1"], "WARN"),
        ({"http_proxy": "http://p", "no_proxy": "node1"}, ["node1"], ["node1"], "PASS"),
        ({"ALL_PROXY": "p", "NO_PROXY": "a,b"}, ["a", "b", "c"], ["does not exempt c:"], "WARN"),
    ],
)
def test_judge_proxy(environ: dict[str, str], hosts: list[str], values: list[str], expected: str) -> None:
    judged = network.judge_proxy(environ, hosts)
    assert status(judged, *values) == expected
    assert "secret" not in judged.fact + judged.remedy
