"""What is made of names, the endpoint, who answers there, clocks and proxies."""

from __future__ import annotations

import socket
import threading

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.preflight import endpoint, proxy
from rallypoint.preflight.endpoint import Answer, Attempt, EndpointFacts, Outcome, PlaceFacts, PortFacts
from rallypoint.preflight.host_name import NameFacts, judge_host_name
from rallypoint.preflight.look_up import LookUp, look_up
from rallypoint.preflight.reaching import attempt_all, read_endpoint
from rallypoint.preflight.table import CheckInputs
from tests.unit.preflight.test_machine import said

NODE = Endpoint("node1", 29400)
FOUND = LookUp(("10.0.0.1",), took=0.01)


@pytest.mark.parametrize(
    ("found", "foreign", "words", "status"),
    [
        (FOUND, (), ["node7 is 10.0.0.1"], "PASS"),
        (LookUp(("127.0.1.1",)), (), ["127.0.1.1, a loopback address", "/etc/hosts"], "WARN"),
        (LookUp(("127.0.0.1", "::1")), (), ["a loopback address"], "WARN"),
        (LookUp(("127.0.1.1", "10.0.0.1")), (), [], "PASS"),
        (LookUp(error="Name or service not known"), (), ["does not resolve (Name or service not known)"], "WARN"),
        (LookUp(took=6.0), (), ["nobody answers", "within 6 s", "DNS servers"], "WARN"),
        (FOUND, ("10.0.0.1",), ["not an address of this machine"], "WARN"),
        (FOUND._replace(took=5.01), (), ["after 5.0 s", "resolv.conf"], "WARN"),
    ],
)
def test_the_name_of_this_machine(found: LookUp, foreign: tuple[str, ...], words: list[str], status: str) -> None:
    assert said(judge_host_name(NameFacts("node7", found, foreign)), "node7", *words) == status


def test_a_job_of_one_node_tells_nobody_its_address() -> None:
    facts = NameFacts("node7", LookUp(("127.0.1.1",)), alone=True)
    assert said(judge_host_name(facts), "no other node") == "not known"


def place(*attempts: Attempt, here: bool = False, took: float = 0.01) -> PlaceFacts:
    return PlaceFacts(NODE, LookUp(tuple(each.address for each in attempts), took=took), attempts, here)


OPEN, CLOSED = Attempt("10.0.0.1", Outcome.ACCEPTED), Attempt("10.0.0.1", Outcome.REFUSED, "Connection refused")
SILENT, LOST = Attempt("10.0.0.2", Outcome.SILENT), Attempt("10.0.0.2", Outcome.UNREACHABLE, "No route to host")
NO_IPV6 = Attempt("fd00::1", Outcome.NO_ROUTE, "Network is unreachable")


@pytest.mark.parametrize(
    ("places", "words", "status"),
    [
        ([], ["no endpoint"], "not known"),
        ([place(OPEN)], ["node1:29400: 10.0.0.1 accepts connections"], "PASS"),
        ([place(CLOSED)], ["10.0.0.1 is reached, and nobody listens at the port"], "PASS"),
        ([place(CLOSED, here=True)], ["node1:29400 (this machine)"], "PASS"),
        ([place(SILENT)], ["10.0.0.2 does not answer", "firewalls"], "FAIL"),
        ([place(LOST)], ["10.0.0.2 cannot be reached (No route to host)", "routes"], "FAIL"),
        ([place(NO_IPV6)], ["fd00::1 cannot be reached (Network is unreachable)"], "FAIL"),
        ([place(OPEN, NO_IPV6)], ["10.0.0.1 accepts connections"], "PASS"),
        ([place(OPEN, LOST)], ["10.0.0.1 accepts", "10.0.0.2 cannot be reached"], "WARN"),
        ([place(SILENT, LOST)], [], "FAIL"),
        ([place(OPEN, took=5.0)], ["look-up took 5.0 s", "resolv.conf"], "WARN"),
        ([PlaceFacts(NODE, LookUp(error="Name or service not known"))], ["node1 does not resolve", "DNS"], "FAIL"),
        ([PlaceFacts(NODE, LookUp(took=6.0))], ["nobody answers what node1 stands for within 6 s"], "FAIL"),
        ([place(OPEN), place(OPEN)], ["accepts"], "PASS"),
        ([place(OPEN), place(LOST)], ["accepts", "No route to host", "routes"], "WARN"),
        ([place(LOST), place(SILENT)], ["No route to host", "does not answer"], "FAIL"),
    ],
)
def test_the_endpoint(places: list[PlaceFacts], words: list[str], status: str) -> None:
    assert said(endpoint.judge_endpoint(EndpointFacts("c10d", tuple(places))), *words) == status


@pytest.mark.parametrize(
    ("places", "words", "status"),
    [
        ([place(OPEN), place(OPEN)], [], "PASS"),
        ([place(OPEN), place(CLOSED)], ["nobody listens at the port", "start etcd there"], "WARN"),
        ([place(CLOSED), place(CLOSED)], ["start etcd there"], "FAIL"),
        ([place(OPEN, CLOSED)], [], "PASS"),
    ],
)
def test_members_of_etcd_have_to_be_there_before(places: list[PlaceFacts], words: list[str], status: str) -> None:
    assert said(endpoint.judge_endpoint(EndpointFacts("etcd", tuple(places))), *words) == status


def test_a_node_that_joins_waits_for_names_and_for_etcd() -> None:
    """On Kubernetes a pod's name is there when the pod is."""
    unknown = PlaceFacts(NODE, LookUp(error="Name or service not known"))
    for backend, facts in (("c10d", unknown), ("etcd", place(CLOSED))):
        assert said(endpoint.judge_endpoint(EndpointFacts(backend, (facts,), joins=True))) == "WARN"
    lost = EndpointFacts("c10d", (place(LOST),), joins=True)
    assert said(endpoint.judge_endpoint(lost)) == "FAIL", "that does not come by waiting"


def test_an_address_is_not_told_twice() -> None:
    facts = place(OPEN)._replace(endpoint=Endpoint("10.0.0.1", 29400))
    assert endpoint.judge_endpoint(EndpointFacts("c10d", (facts,))).fact == "10.0.0.1:29400: accepts connections"


@pytest.mark.parametrize(
    ("answer", "status"),
    [(Answer(welcome="it answers"), "PASS"), (Answer(absent="nobody yet"), "not known"), (Answer(), "not known")],
)
def test_the_control_plane(answer: Answer, status: str) -> None:
    assert said(endpoint.judge_control_plane(EndpointFacts("c10d", answer=answer))) == status


def test_the_control_plane_s_refusal_is_a_sentence_with_its_remedy() -> None:
    told = "this control plane belongs to job 'a', not to 'b'; give each job an endpoint of its own"
    judged = endpoint.judge_control_plane(EndpointFacts("c10d", answer=Answer(refusal=told)))
    assert (judged.status, judged.fact, judged.remedy) == ("FAIL", told, "")


@pytest.mark.parametrize(
    ("offset", "uncertainty", "words", "status"),
    [
        (None, 0.0, ["no control plane"], "not known"),
        (0.0, 0.001, ["0.000 s"], "PASS"),
        (0.9, 0.0, ["0.900 s ahead of"], "PASS"),
        (1.0, 0.001, [], "PASS"),
        (-1.5, 0.1, ["1.500 s behind", "give or take 0.100 s", "chrony"], "WARN"),
        (3.0, 2.5, ["give or take 2.500 s"], "PASS"),
        (299.0, 0.0, [], "WARN"),
        (-3600.0, 0.01, ["3600.000 s behind"], "FAIL"),
        (-1.7e9, 0.01, [], "FAIL"),
    ],
)
def test_clocks(offset: float | None, uncertainty: float, words: list[str], status: str) -> None:
    facts = EndpointFacts("c10d", answer=Answer(offset=offset, uncertainty=uncertainty))
    assert said(endpoint.judge_clock(facts), *words) == status


@pytest.mark.parametrize(
    ("facts", "words", "status"),
    [
        (EndpointFacts("c10d"), [], "not known"),
        (EndpointFacts("etcd", (place(CLOSED, here=True),)), [], "not known"),
        (EndpointFacts("c10d", (place(CLOSED),)), ["node1 is not this machine"], "not known"),
        (EndpointFacts("c10d", (place(OPEN, here=True),)), ["see control-plane"], "PASS"),
        (EndpointFacts("c10d", (place(CLOSED, here=True),), port=PortFacts((32768, 60999))), ["outside"], "PASS"),
        (
            EndpointFacts("c10d", (place(CLOSED, here=True),), port=PortFacts((20000, 60999))),
            ["inside", "20000-60999", "ip_local_reserved_ports=29400"],
            "WARN",
        ),
        (
            EndpointFacts(
                "static", (place(CLOSED, here=True),), port=PortFacts((20000, 60999), ((1, 1), (29390, 29400)))
            ),
            ["reserved"],
            "PASS",
        ),
        (
            EndpointFacts("c10d", (place(CLOSED, here=True),), port=PortFacts((1, 2), (), "Address already in use")),
            ["29400 cannot be listened at (Address already in use)", "ss -tanp"],
            "FAIL",
        ),
    ],
)
def test_the_port(facts: EndpointFacts, words: list[str], status: str) -> None:
    assert said(endpoint.judge_port(facts), *words) == status


def test_attempts_end_as_the_kernel_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert attempt_all([("127.0.0.1", port)]) == (Attempt("127.0.0.1", Outcome.ACCEPTED),)
    assert attempt_all([("127.0.0.1", port)]) == (Attempt("127.0.0.1", Outcome.REFUSED, "Connection refused"),)
    assert attempt_all([]) == ()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        where = ("127.0.0.1", full.getsockname()[1])
        with socket.create_connection(where):  # nobody accepts it, and there is no place for a second one
            assert attempt_all([where], 0.2) == (Attempt("127.0.0.1", Outcome.SILENT),)


def test_a_port_that_an_outgoing_connection_has_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as taken:
        port = taken.getsockname()[1]
        facts = read_endpoint(CheckInputs(endpoints=(("127.0.0.1", port),), backend="c10d"))
    assert facts.places[0].is_here
    assert facts.port.trouble == "Address already in use"


def test_a_look_up_that_nobody_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def hang(host: str) -> list[str]:
        answered.wait(30)
        return ["10.0.0.1"]

    monkeypatch.setattr("rallypoint.preflight.look_up.resolve", hang)
    try:
        found = look_up("node1", 0.05)
        assert found.unanswered
        assert found.took >= 0.05
    finally:
        answered.set()


@pytest.mark.parametrize(
    ("host", "spared", "is_spared"),
    [
        ("node1", "", False),
        ("node1", "node1", True),
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
    assert proxy.is_spared(host, spared) is is_spared


@pytest.mark.parametrize(
    ("environ", "endpoints", "words", "status"),
    [
        ({}, (("node1", 1),), ["no proxy"], "PASS"),
        ({"http_proxy": ""}, (("node1", 1),), ["no proxy"], "PASS"),
        ({"http_proxy": "http://p"}, (), ["http_proxy"], "not known"),
        ({"http_proxy": "http://me:secret@p"}, (("node1", 1),), ["http_proxy", "does not spare node1"], "WARN"),
        ({"HTTPS_PROXY": "http://p"}, (("node1", 1),), ["HTTPS_PROXY", "add node1"], "WARN"),
        ({"http_proxy": "http://p", "no_proxy": "node1"}, (("node1", 1),), ["no_proxy spares node1"], "PASS"),
        ({"ALL_PROXY": "p", "NO_PROXY": "a,b"}, (("a", 1), ("b", 2), ("c", 1)), ["does not spare c:"], "WARN"),
    ],
)
def test_proxies(
    environ: dict[str, str], endpoints: tuple[tuple[str, int], ...], words: list[str], status: str
) -> None:
    judged = proxy.judge_proxy(proxy.proxy_facts(environ, CheckInputs(endpoints=endpoints)))
    assert said(judged, *words) == status
    assert "secret" not in judged.fact + judged.remedy
