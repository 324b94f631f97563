"""Finds out about the endpoint: looks its name up, connects, greets the control plane, and asks the kernel of its port.

Nothing here joins a job: the control plane is only greeted (`Hello.only_greets`).
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, is_local_address
from rallypoint.base.errors import RallypointError, UserError
from rallypoint.base.procfs import local_port_range, read_text
from rallypoint.preflight import endpoint as judging
from rallypoint.preflight.endpoint import Answer, Attempt, EndpointFacts, Outcome, PlaceFacts, PortFacts
from rallypoint.preflight.look_up import LOOK_UP, SLOW, look_up
from rallypoint.preflight.results import warned
from rallypoint.preflight.table import Check, CheckInputs, Reading

if TYPE_CHECKING:
    from rallypoint.client.dialing import DialTarget

CONNECT, ASK = 3.0, 3.0
"""Seconds for a TCP connection; for the control plane's welcome."""
_MOST = 16
"""Addresses of one name that are tried."""


def read_endpoint(inputs: CheckInputs) -> EndpointFacts:
    """Find out whatever can be."""
    if not inputs.endpoints:
        return EndpointFacts(inputs.backend)
    with ThreadPoolExecutor(len(inputs.endpoints)) as pool:  # none takes longer than `LOOK_UP` and `CONNECT`
        places = list(pool.map(_place, (Endpoint(*each) for each in inputs.endpoints)))
    facts = EndpointFacts(inputs.backend, tuple(places), joins=inputs.joins)
    if facts.is_ours and places[0].is_here:
        facts = facts._replace(port=_port_facts(places[0]))
    return facts._replace(answer=_ask(inputs, facts))


def _place(endpoint: Endpoint) -> PlaceFacts:
    found = look_up(endpoint.host)
    attempts = attempt_all([(each, endpoint.port) for each in found.addresses[:_MOST]])
    return PlaceFacts(endpoint, found, attempts, any(map(is_local_address, found.addresses)))


def attempt_all(addresses: list[tuple[str, int]], seconds: float = CONNECT) -> tuple[Attempt, ...]:
    """Try to connect to all addresses at once, and close each connection again.

    Args:
        addresses: numeric addresses with their ports.
        seconds: until when an answer is waited for.
    """
    deadline = Deadline.after(seconds)
    attempts = [Attempt(address, Outcome.SILENT) for address, _ in addresses]
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for number, (address, port) in enumerate(addresses):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                made = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError as error:  # there is no such family here
                attempts[number] = Attempt(address, Outcome.NO_ROUTE, error.strerror or str(error))
                continue
            made.setblocking(False)
            code = made.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                selector.register(made, selectors.EVENT_WRITE, (number, made))
            else:
                attempts[number] = _attempt(address, code)
        while selector.get_map() and not deadline.expired:
            for key, _ in selector.select(deadline.remaining()):
                number, made = key.data
                attempts[number] = _attempt(addresses[number][0], made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                selector.unregister(made)
    return tuple(attempts)


def _attempt(address: str, code: int) -> Attempt:
    words = os.strerror(code) if code else ""
    return Attempt(address, _OUTCOMES.get(code, Outcome.UNREACHABLE), words)


_OUTCOMES = {
    0: Outcome.ACCEPTED,
    errno.ECONNREFUSED: Outcome.REFUSED,
    errno.ETIMEDOUT: Outcome.SILENT,
    errno.ENETUNREACH: Outcome.NO_ROUTE,
    errno.EADDRNOTAVAIL: Outcome.NO_ROUTE,
}


def _ask(inputs: CheckInputs, facts: EndpointFacts) -> Answer:
    """Greet the control plane, if anybody may be there."""
    if inputs.coordinators is None:
        return Answer(absent=f"what answers for the backend {facts.backend!r} is not Rallypoint's to ask")
    if not any(place.having(Outcome.ACCEPTED) for place in facts.places):
        return Answer(absent="nobody listens at the endpoint")
    import asyncio

    from rallypoint.etcd.api import EtcdError

    try:
        targets = inputs.coordinators()
    except (EtcdError, UserError) as error:
        return Answer(refusal=str(error))
    except RallypointError as error:
        return Answer(absent=str(error))
    answer = Answer(absent="nobody is coordinator at the moment")
    for target in targets:
        answer = asyncio.run(_greet(target, inputs.job))
        if answer.welcome:
            break
    return answer


async def _greet(target: DialTarget, job: str) -> Answer:
    import asyncio

    from rallypoint.client.dialing import RETRYABLE, Dialer, error_words
    from rallypoint.membership.state import Settings
    from rallypoint.protocol.handshake import HandshakeError

    begun, before = time.monotonic(), time.time()
    dialer = Dialer(target, Settings(job, 1, 1), 0, only_greets=True)
    try:
        async with asyncio.timeout(ASK):
            session = await dialer.dial(CONNECT)
    except HandshakeError as error:
        return Answer(refusal=str(error))
    except ConnectionRefusedError:
        return Answer(absent=f"nobody listens at {target.endpoint} at the moment")
    except RETRYABLE as error:
        return Answer(
            refusal=f"what listens at {target.endpoint} does not answer as Rallypoint's control plane does "
            f"({error_words(error) or dialer.unfinished}); see what it is, or choose another port"
        )
    took = time.monotonic() - begun
    session.writer.close()
    return Answer(
        f"Rallypoint's control plane answers at {target.endpoint}",
        offset=session.welcome.timestamp - (before + took / 2),
        uncertainty=took / 2,
    )


# The port


def _port_facts(place: PlaceFacts) -> PortFacts:
    low, high = ([int(each) for each in local_port_range().split()] or [0, 0])[:2]
    reserved = tuple(_ranges(read_text("/proc/sys/net/ipv4/ip_local_reserved_ports")))
    return PortFacts((low, high), reserved, "" if place.having(Outcome.ACCEPTED) else _trouble_with(place))


def _trouble_with(place: PlaceFacts) -> str:
    """Why the port cannot be bound; empty if it can be, or another agent of this machine listens there by now."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", place.endpoint.port))  # and nobody can connect
    except OSError as error:
        again = attempt_all([(each.address, place.endpoint.port) for each in place.attempts])
        return "" if any(each.outcome is Outcome.ACCEPTED for each in again) else error.strerror or str(error)
    return ""


def _ranges(text: str) -> list[tuple[int, int]]:
    """`29400,30000-30010`."""
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return [(int(part[0]), int(part[-1])) for part in parts]


ENDPOINT = Reading(
    read_endpoint,
    (
        Check(
            "endpoint",
            "Whether the endpoint's name resolves, and its host is reached by TCP at each of its addresses. An "
            "endpoint where nothing listens yet is a problem only on etcd.",
            f"one of several addresses or endpoints is not reached, or the look-up took {SLOW:.0f} s; with "
            "`--preflight` also what may change later: a name that does not resolve, or no member of etcd that listens",
            f"it does not resolve, or not within {LOOK_UP:.0f} s, or no address of it is reached within "
            f"{CONNECT:.0f} s; no member of etcd listens",
            "DNS, /etc/hosts, routes, firewalls",
            judging.judge_endpoint,
        ),
        Check(
            "control-plane",
            "Whether the program that listens at the endpoint, if there is one, is Rallypoint's control plane and "
            "accepts this node: job, secret, TLS, version. It is greeted, but no session is opened.",
            "",
            "it is another program or belongs to another job, or does not accept this node's secret or certificate",
            "what the line of the check says",
            judging.judge_control_plane,
        ),
        Check(
            "port",
            "If the endpoint is this machine: whether its port is free, and outside the range from which the kernel "
            "takes ports for outgoing connections, one of which may use it when the job starts.",
            "inside the range, and not reserved",
            "it cannot be bound",
            "another port, or `net.ipv4.ip_local_reserved_ports`",
            judging.judge_port,
        ),
        Check(
            "clock",
            "The clock of the coordinator, compared with this one. Rallypoint does not depend on equal clocks, but "
            "logs, certificates, tickets and file times do.",
            f"{judging.MAX_OFFSET:.0f} s or more, beyond the uncertainty",
            f"{judging.HOPELESS_OFFSET:.0f} s or more",
            "an NTP client such as chrony on both machines",
            judging.judge_clock,
        ),
    ),
    warned("the endpoint could not be examined in time", "see whether DNS and the endpoint answer"),
)
