"""Checks of names, the endpoint, the service there, clocks, and proxies.

None of these checks joins a job: they only greet the control plane (`Hello.only_greets`). Pure functions judge results.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.endpoint import Endpoint, host_name, is_local_address, is_loopback
from rallypoint.base.errors import RallypointError, UserError
from rallypoint.base.procfs import local_port_range, read_text
from rallypoint.clusters.preflight.dialing import CONNECT, SLOW, Attempt, DialOutcome, LookUp, attempt_all, look_up
from rallypoint.clusters.preflight.results import CheckInputs, CheckResult, failed, passed, skipped, warned

if TYPE_CHECKING:
    from rallypoint.control.client.dialing import DialTarget

ASK = 3.0
"""Seconds to wait for the control plane's welcome."""
MAX_OFFSET, HOPELESS_OFFSET = 1.0, 300.0
"""Maximum difference between clocks in seconds. From five minutes on, Kerberos and many signature checks fail."""
_MOST = 16
"""Maximum number of addresses to try per name."""
_SLOW_DNS = "remove DNS servers that do not answer from resolv.conf"


# The name of this machine. Many programs use its local resolution as the machine's address.


def own_name(inputs: CheckInputs) -> Iterator[CheckResult]:
    if inputs.max_nodes == 1:
        yield skipped("the job has no other node")
        return
    answer = look_up(socket.gethostname())
    yield judge_host_name(
        host_name(), answer, [address for address in answer.addresses if not is_local_address(address)]
    )


def judge_host_name(name: str, answer: LookUp, foreign: Sequence[str]) -> CheckResult:
    """Judge the address of this name, which Gloo and programs that call `socket.gethostname()` send to others.

    `foreign` are its addresses that belong to other machines.
    """
    remedy = f"map {name} to the address at which other nodes reach this one, in DNS or /etc/hosts"
    if answer.unanswered:
        return warned(
            f"the lookup of {name} was not answered within {answer.took:.0f} s", f"check the DNS servers, or {remedy}"
        )
    if answer.error:
        return warned(f"{name} does not resolve ({answer.error})", remedy)
    text = f"{name} is {', '.join(answer.addresses)}"
    if all(map(is_loopback, answer.addresses)):
        return warned(f"{text}, a loopback address: other nodes that use it reach themselves", remedy)
    if foreign:
        return warned(f"{text}, of which {', '.join(foreign)} is not an address of this machine", remedy)
    if answer.took >= SLOW:
        return warned(f"{text}, after {answer.took:.1f} s", _SLOW_DNS)
    return passed(text)


# The endpoint


class EndpointProbe(NamedTuple):
    """One endpoint: its addresses, what happened when connecting, and whether it is this machine."""

    endpoint: Endpoint
    found: LookUp
    attempts: Sequence[Attempt] = ()
    is_here: bool = False

    def attempts_with(self, *outcomes: DialOutcome) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.outcome in outcomes]


_NO_ENDPOINT = "no endpoint to check"


def endpoint(inputs: CheckInputs) -> Iterator[CheckResult]:
    places: list[EndpointProbe] = []
    if inputs.endpoints:
        with ThreadPoolExecutor(len(inputs.endpoints)) as pool:  # each takes at most `LOOK_UP` plus `CONNECT`
            places = list(pool.map(_place, (Endpoint(*given) for given in inputs.endpoints)))
    is_ours = inputs.backend in ("c10d", "static")  # the service there
    yield judge_endpoint(places, is_ours=is_ours, joins=inputs.joins)
    answer = _ask(inputs, places) if places else Answer()
    yield judge_control_plane(answer)
    yield _port(places[0]) if places and is_ours else skipped("Rallypoint would not listen at any endpoint")
    yield judge_clock(answer)


def _place(endpoint: Endpoint) -> EndpointProbe:
    answer = look_up(endpoint.host)
    attempts = attempt_all([(address, endpoint.port) for address in answer.addresses[:_MOST]])
    return EndpointProbe(endpoint, answer, attempts, any(map(is_local_address, answer.addresses)))


def judge_endpoint(places: Sequence[EndpointProbe], *, is_ours: bool = True, joins: bool = False) -> CheckResult:
    """Judge whether the endpoint's name resolves and its host is reachable.

    With `is_ours` (a service of Rallypoint), a missing listener is no fault, since nodes start in any order. A node
    that `joins` waits for an unresolved name and for etcd.
    """
    judged = [_judge_place(place, is_ours=is_ours, joins=joins) for place in places]
    if not judged:
        return skipped(_NO_ENDPOINT)
    if len(judged) == 1:
        return judged[0]
    text = "; ".join(result.fact for result in judged)
    if all(result.status == "FAIL" for result in judged):
        return failed(text, judged[0].remedy)
    bad = [result for result in judged if result.status != "PASS"]
    return warned(text, bad[0].remedy) if bad else passed(text)


def _judge_place(place: EndpointProbe, *, is_ours: bool, joins: bool) -> CheckResult:
    where, answer = place.endpoint, place.found
    failed_yet = warned if joins else failed
    dns = "check the endpoint, DNS and /etc/hosts"
    if answer.unanswered:
        return failed(
            f"the lookup of {where.host} was not answered within {answer.took:.0f} s", f"check the DNS servers; {dns}"
        )
    if answer.error:
        return failed_yet(f"{where.host} does not resolve ({answer.error})", dns)
    reached = place.attempts_with(DialOutcome.ACCEPTED, DialOutcome.REFUSED)
    lost = place.attempts_with(DialOutcome.SILENT, DialOutcome.UNREACHABLE)
    lost += [] if reached else place.attempts_with(DialOutcome.NO_ROUTE)  # otherwise the other address family works
    text = f"{where}{' (this machine)' if place.is_here else ''}: {_words(place.attempts, where.host)}"
    if not is_ours and reached and not place.attempts_with(DialOutcome.ACCEPTED):
        return failed_yet(text, "start etcd there, or remove it from the endpoint")
    if lost:
        remedy = "check the address, the routes and firewalls between the machines, and that the host is up"
        return warned(text, remedy) if reached else failed(text, remedy)
    if answer.took >= SLOW:
        return warned(f"{text}; its lookup took {answer.took:.1f} s", _SLOW_DNS)
    return passed(text)


_OUTCOMES = {
    DialOutcome.ACCEPTED: "accepts connections",
    DialOutcome.REFUSED: "is reachable, but nothing is listening on the port",
    DialOutcome.SILENT: "does not answer",
}


def _words(attempts: Sequence[Attempt], host: str) -> str:
    groups: dict[str, list[str]] = {}
    for attempt in attempts:
        groups.setdefault(_OUTCOMES.get(attempt.outcome) or f"cannot be reached ({attempt.words})", []).append(
            attempt.address
        )
    if list(groups.values()) == [[host]]:
        return next(iter(groups))
    return ", ".join(f"{', '.join(addresses)} {words}" for words, addresses in groups.items())


# The service at the endpoint, and its clock


class Answer(NamedTuple):
    """The control plane's answer; at most one of the first three is set.

    `refusal` is a sentence that says why it is unusable; `absent` means that nobody answers now. Its clock is `offset`
    seconds ahead of this one, plus or minus `uncertainty`.
    """

    welcome: str = ""
    refusal: str = ""
    absent: str = ""
    offset: float | None = None
    uncertainty: float = 0.0


def _ask(inputs: CheckInputs, places: Sequence[EndpointProbe]) -> Answer:
    if inputs.coordinators is None:
        return Answer(absent=f"the backend {inputs.backend!r} has no Rallypoint control plane to query")
    if not any(place.attempts_with(DialOutcome.ACCEPTED) for place in places):
        return Answer(absent="nothing is listening at the endpoint")
    import asyncio

    from rallypoint.control.etcd.api import EtcdError

    try:
        targets = inputs.coordinators()
    except (EtcdError, UserError) as error:
        return Answer(refusal=str(error))
    except RallypointError as error:
        return Answer(absent=str(error))
    answer = Answer(absent="the job has no coordinator at the moment")
    for target in targets:
        answer = asyncio.run(_greet(target, inputs.job))
        if answer.welcome:
            break
    return answer


async def _greet(target: DialTarget, job: str) -> Answer:
    import asyncio

    from rallypoint.control.client.dialing import RETRYABLE, Dialer, error_words
    from rallypoint.control.membership.state import Settings
    from rallypoint.control.protocol.handshake import HandshakeError

    began, before = time.monotonic(), time.time()
    dialer = Dialer(target, Settings(job, 1, 1), only_greets=True)
    try:
        async with asyncio.timeout(ASK):
            session = await dialer.dial(CONNECT)
    except HandshakeError as error:
        return Answer(refusal=str(error))
    except ConnectionRefusedError:
        return Answer(absent=f"nothing is listening at {target.endpoint} at the moment")
    except RETRYABLE as error:
        return Answer(
            refusal=f"the program listening at {target.endpoint} does not answer like Rallypoint's control plane "
            f"({error_words(error) or dialer.unfinished}); find out which program it is, or choose another port"
        )
    took = time.monotonic() - began
    session.writer.close()
    return Answer(
        f"Rallypoint's control plane answers at {target.endpoint}",
        offset=session.welcome.timestamp - (before + took / 2),
        uncertainty=took / 2,
    )


def judge_control_plane(answer: Answer) -> CheckResult:
    if answer.refusal:
        return failed(answer.refusal, "")
    return passed(answer.welcome) if answer.welcome else skipped(answer.absent or _NO_ENDPOINT)


def judge_clock(answer: Answer) -> CheckResult:
    """Judge the difference between the endpoint's clock and this one. Only people compare them, never Rallypoint."""
    offset, uncertainty = answer.offset, answer.uncertainty
    if offset is None:
        return skipped("no control plane has reported the time of day")
    way = "ahead of" if offset > 0 else "behind"
    text = f"the coordinator's clock is {abs(offset):.3f} s {way} this one's, give or take {uncertainty:.3f} s"
    sure = max(0.0, abs(offset) - uncertainty)
    remedy = "run chrony or another NTP client on both machines"
    if sure >= HOPELESS_OFFSET:
        return failed(text, remedy)
    return warned(text, remedy) if sure >= MAX_OFFSET else passed(text)


# The port


def _port(place: EndpointProbe) -> CheckResult:
    if not place.is_here:
        return skipped(f"{place.endpoint.host} is not this machine; run the check there")
    port = place.endpoint.port
    if place.attempts_with(DialOutcome.ACCEPTED):
        return passed(f"a process is listening on port {port} (see control-plane)")
    low, high = ([int(part) for part in local_port_range().split()] or [0, 0])[:2]
    reserved = _ranges(read_text("/proc/sys/net/ipv4/ip_local_reserved_ports"))
    return judge_port(port, _trouble_with(place), (low, high), reserved)


def judge_port(
    port: int, trouble: str, ephemeral: tuple[int, int], reserved: Sequence[tuple[int, int]] = ()
) -> CheckResult:
    """Judge whether an outgoing connection can take, or has taken, the port before the control plane listens on it.

    The kernel uses ports in the range `ephemeral`, except `reserved` ones, for outgoing connections.
    """
    if trouble:
        return failed(
            f"port {port} cannot be used ({trouble})", f"find out which process uses it (`ss -tanp sport = :{port}`)"
        )
    low, high = ephemeral
    if not low <= port <= high:
        return passed(f"port {port} is outside the range of outgoing connections, {low}-{high}")
    text = f"port {port} is inside the range of outgoing connections, {low}-{high}"
    if any(first <= port <= last for first, last in reserved):
        return passed(f"{text}, and reserved")
    return warned(
        f"{text}: any of them might use it first",
        f"choose another port, or reserve it: `sysctl -w net.ipv4.ip_local_reserved_ports={port}`",
    )


def _trouble_with(place: EndpointProbe) -> str:
    """Why the port cannot be bound; empty if it can, or if another agent on this machine is listening on it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", place.endpoint.port))  # nobody can connect to it
    except OSError as error:
        again = attempt_all([(attempt.address, place.endpoint.port) for attempt in place.attempts])
        return "" if any(attempt.outcome is DialOutcome.ACCEPTED for attempt in again) else error.strerror or str(error)
    return ""


def _ranges(text: str) -> list[tuple[int, int]]:
    """Parse ranges such as `29400,30000-30010`."""
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return [(int(part[0]), int(part[-1])) for part in parts]


# Proxy variables that would divert connections to the endpoint

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def proxy(inputs: CheckInputs) -> Iterator[CheckResult]:
    yield judge_proxy(os.environ, list(dict.fromkeys(host for host, _ in inputs.endpoints)))


def judge_proxy(environ: Mapping[str, str], hosts: Sequence[str]) -> CheckResult:
    """Judge proxies. Rallypoint uses none, but gRPC, requests and curl do, for etcd and other nodes. Do not show the
    variables' values, which may contain a password.
    """
    names = ", ".join(name for variable in VARIABLES for name in (variable, variable.upper()) if environ.get(name))
    if not names:
        return passed("no proxy variable is set")
    if not hosts:
        return skipped(f"{names} set, but there is no endpoint to which it would apply")
    spared = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"))
    caught = [host for host in hosts if not is_spared(host, spared)]
    if not caught:
        return passed(f"{names} set, and no_proxy exempts {', '.join(hosts)}")
    return warned(
        f"{names} set, but no_proxy does not exempt {', '.join(caught)}: gRPC, requests and curl would go through the "
        "proxy",
        f"add {','.join(caught)}, and the other nodes, to no_proxy",
    )


def is_spared(host: str, no_proxy: str) -> bool:
    """Whether `no_proxy` exempts a host: by name, parent domain, address, network, or `*`."""
    entries = [entry.strip().lower() for entry in no_proxy.split(",") if entry.strip()]
    return any(entry == "*" or _matches(host.lower().rstrip("."), entry) for entry in entries)


def _matches(host: str, entry: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        domain = entry.removeprefix("*").lstrip(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))
    try:
        return address in ip_network(entry, strict=False)
    except ValueError:
        return False
