"""Judgements of names, the endpoint, the program that answers there, clocks and proxies."""

from __future__ import annotations

import socket

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.clusters.preflight import network
from rallypoint.clusters.preflight.dialing import Attempt, DialOutcome, LookUp
from rallypoint.clusters.preflight.network import Answer, EndpointProbe
from rallypoint.clusters.preflight.results import CheckInputs, Status
from tests.unit.preflight.test_machine import status

NODE = Endpoint("node1", 29400)
FOUND = LookUp(("10.0.0.1",), took=0.01)


@pytest.mark.parametrize(
    ("found", "foreign", "values", "expected"),
    [
        (FOUND, [], ["10.0.0.1"], "PASS"),
        (FOUND._replace(took=1.99), [], [], "PASS"),
        (FOUND._replace(took=2.0), [], ["2.0 s"], "WARN"),
        (LookUp(("127.0.1.1", "::1")), [], ["127.0.1.1", "loopback"], "WARN"),
        (LookUp(("127.0.1.1", "10.0.0.1")), [], [], "PASS"),
        (LookUp(error="Name or service not known"), [], ["(Name or service not known)"], "WARN"),
        (LookUp(took=6.0), [], ["6 s"], "WARN"),
        (FOUND, ["10.0.0.1"], ["not an address of this machine"], "WARN"),
    ],
)
def test_the_name_of_this_machine(found: LookUp, foreign: list[str], values: list[str], expected: str) -> None:
    assert status(network.judge_host_name("node7", found, foreign), "node7", *values) == expected


def test_a_job_of_one_node_tells_nobody_its_address() -> None:
    (found,) = network.own_name(CheckInputs(max_nodes=1))
    assert found.status is Status.SKIP


def place(*attempts: Attempt, here: bool = False, took: float = 0.01) -> EndpointProbe:
    return EndpointProbe(NODE, LookUp(tuple(each.address for each in attempts), took=took), attempts, here)


OPEN, CLOSED = Attempt("10.0.0.1", DialOutcome.ACCEPTED), Attempt("10.0.0.1", DialOutcome.REFUSED, "Connection refused")
SILENT, LOST = Attempt("10.0.0.2", DialOutcome.SILENT), Attempt("10.0.0.2", DialOutcome.UNREACHABLE, "No route to host")
NO_IPV6 = Attempt("fd00::1", DialOutcome.NO_ROUTE, "Network is unreachable")
UNKNOWN = EndpointProbe(NODE, LookUp(error="Name or service not known"))


@pytest.mark.parametrize(
    ("places", "values", "expected"),
    [
        ([], [], "SKIP"),
        ([place(OPEN)], ["node1:29400", "10.0.0.1"], "PASS"),
        ([place(CLOSED, here=True)], ["(this machine)"], "PASS"),
        ([place(SILENT)], ["10.0.0.2"], "FAIL"),
        ([place(LOST)], ["10.0.0.2", "(No route to host)"], "FAIL"),
        ([place(NO_IPV6)], ["fd00::1", "(Network is unreachable)"], "FAIL"),
        ([place(OPEN, NO_IPV6)], ["10.0.0.1"], "PASS"),
        ([place(OPEN, LOST)], ["10.0.0.1", "10.0.0.2"], "WARN"),
        ([place(OPEN, took=2.0)], ["2.0 s"], "WARN"),
        ([UNKNOWN], ["node1"], "FAIL"),
        ([EndpointProbe(NODE, LookUp(took=6.0))], ["node1", "6 s"], "FAIL"),
        ([place(OPEN), place(OPEN)], [], "PASS"),
        ([place(OPEN), place(LOST)], ["No route to host"], "WARN"),
        ([place(LOST), place(SILENT)], ["No route to host"], "FAIL"),
    ],
)
def test_the_endpoint(places: list[EndpointProbe], values: list[str], expected: str) -> None:
    assert status(network.judge_endpoint(places), *values) == expected


@pytest.mark.parametrize(
    ("places", "values", "expected"),
    [
        ([place(OPEN), place(OPEN)], [], "PASS"),
        ([place(OPEN), place(CLOSED)], ["etcd"], "WARN"),
        ([place(CLOSED), place(CLOSED)], ["etcd"], "FAIL"),
        ([place(OPEN, CLOSED)], [], "PASS"),
    ],
)
def test_members_of_etcd_have_to_be_there_before(places: list[EndpointProbe], values: list[str], expected: str) -> None:
    assert status(network.judge_endpoint(places, is_ours=False), *values) == expected


def test_a_node_that_joins_waits_for_names_and_for_etcd() -> None:
    """On Kubernetes a pod's name is there when the pod is."""
    assert status(network.judge_endpoint([UNKNOWN], joins=True)) == "WARN"
    assert status(network.judge_endpoint([place(CLOSED)], is_ours=False, joins=True)) == "WARN"
    assert status(network.judge_endpoint([place(LOST)], joins=True)) == "FAIL", "that does not come by waiting"


def test_an_address_is_not_told_twice() -> None:
    found = place(OPEN)._replace(endpoint=Endpoint("10.0.0.1", 29400))
    assert network.judge_endpoint([found]).fact.count("10.0.0.1") == 1


def test_the_control_plane() -> None:
    assert network.judge_control_plane(Answer(welcome="it answers")).status == "PASS"
    assert network.judge_control_plane(Answer(absent="nobody yet")).status == "SKIP"
    assert network.judge_control_plane(Answer()).status == "SKIP"
    refused = network.judge_control_plane(Answer(refusal="a sentence with its remedy"))
    assert (refused.status, refused.fact, refused.remedy) == ("FAIL", "a sentence with its remedy", "")


@pytest.mark.parametrize(
    ("offset", "uncertainty", "values", "expected"),
    [
        (None, 0.0, [], "SKIP"),
        (0.999, 0.0, ["0.999 s ahead of"], "PASS"),
        (1.0, 0.0, [], "WARN"),
        (-1.5, 0.1, ["1.500 s behind", "0.100 s"], "WARN"),
        (3.0, 2.5, ["2.500 s"], "PASS"),
        (299.0, 0.0, [], "WARN"),
        (-300.0, 0.0, [], "FAIL"),
    ],
)
def test_clocks(offset: float | None, uncertainty: float, values: list[str], expected: str) -> None:
    assert status(network.judge_clock(Answer(offset=offset, uncertainty=uncertainty)), *values) == expected


@pytest.mark.parametrize(
    ("trouble", "ephemeral", "reserved", "expected"),
    [
        ("", (29401, 60999), [], "PASS"),
        ("", (20000, 29399), [], "PASS"),
        ("", (29400, 29400), [], "WARN"),
        ("", (20000, 60999), [(1, 1), (29390, 29400)], "PASS"),
        ("Address already in use", (1, 2), [], "FAIL"),
    ],
)
def test_the_port(trouble: str, ephemeral: tuple[int, int], reserved: list[tuple[int, int]], expected: str) -> None:
    assert status(network.judge_port(29400, trouble, ephemeral, reserved), "29400", trouble) == expected


def test_the_port_is_looked_at_where_the_control_plane_would_listen() -> None:
    def found(port: int, backend: str) -> str:
        _, _, result, _ = network.endpoint(CheckInputs(endpoints=(("127.0.0.1", port),), backend=backend))
        return result.status

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as taken:
        listening, outgoing = server.getsockname()[1], taken.getsockname()[1]
        assert found(listening, "c10d") == "PASS", "somebody listens, who is asked by another check"
        assert found(outgoing, "c10d") == "FAIL", "an outgoing connection has it"
        assert found(outgoing, "etcd") == "SKIP"


@pytest.mark.parametrize(
    ("host", "spared", "is_spared"),
    [
        ("node1", "", False),
        ("node1", "node2, NODE1", True),
        ("node10", "node1", False),
        ("node1.cluster.local", "cluster.local", True),
        ("node1.cluster.local", ".cluster.local", True),
        ("node1.cluster.local", "*.cluster.local", True),
        ("node1.mycluster.local", "cluster.local", False),
        ("node1.", "node1", True),
        ("node1", "*", True),
        ("node1", ".", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.0/8", True),
        ("10.0.0.1", "192.168.0.0/16,x", False),
        ("10.0.0.1", "0.0.1", False),
        ("fd00::1", "fd00::/8", True),
        ("fd00::1", "10.0.0.0/8", False),
    ],
)
def test_what_no_proxy_spares(host: str, spared: str, is_spared: bool) -> None:
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
def test_proxies(environ: dict[str, str], hosts: list[str], values: list[str], expected: str) -> None:
    judged = network.judge_proxy(environ, hosts)
    assert status(judged, *values) == expected
    assert "secret" not in judged.fact + judged.remedy
