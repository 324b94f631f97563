"""Judges what was found out about the endpoint: names, ways, who answers, its port, its clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from rallypoint.base.endpoint import Endpoint
from rallypoint.preflight.look_up import SLOW, LookUp
from rallypoint.preflight.results import Judgement, failed, not_known, passed, warned

MAX_OFFSET, HOPELESS_OFFSET = 1.0, 300.0
"""Seconds by which clocks may differ. From five minutes on Kerberos, and much of what checks signatures, refuses."""


class Outcome(StrEnum):
    """The outcome of an attempt at a TCP connection."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    NO_ROUTE = "no route"
    """This machine has no way to such an address, as to one of IPv6 where it has none."""


class Attempt(NamedTuple):
    """One address, and how the attempt to connect to it has ended; `words` are the kernel's."""

    address: str
    outcome: Outcome
    words: str = ""


class PlaceFacts(NamedTuple):
    """One of the endpoints."""

    endpoint: Endpoint
    found: LookUp
    attempts: tuple[Attempt, ...] = ()
    is_here: bool = False
    """Whether it is an address of this machine."""

    def having(self, outcome: Outcome) -> list[Attempt]:
        """The attempts that have ended so."""
        return [each for each in self.attempts if each.outcome is outcome]


class Answer(NamedTuple):
    """The answer of the control plane; at most one of the first three is set.

    `refusal` is the sentence that tells why it is of no use; `absent` that nobody is there now. The clock there is
    `offset` seconds ahead of this one, give or take `uncertainty`.
    """

    welcome: str = ""
    refusal: str = ""
    absent: str = ""
    offset: float | None = None
    uncertainty: float = 0.0


class PortFacts(NamedTuple):
    """What the kernel does with ports here: those that it gives to outgoing connections, but for the reserved ones;
    `trouble` is why the endpoint's cannot be bound."""

    ephemeral: tuple[int, int] = (0, 0)
    reserved: tuple[tuple[int, int], ...] = ()
    trouble: str = ""


class EndpointFacts(NamedTuple):
    """All of it.

    `backend` is its name; there are no `places` where there is nothing to be checked. A node that `joins`
    afterwards waits for a name that does not resolve, and for etcd.
    """

    backend: str
    places: tuple[PlaceFacts, ...] = ()
    answer: Answer = Answer()
    port: PortFacts = PortFacts()
    joins: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether what listens there is Rallypoint's own."""
        return self.backend in ("c10d", "static")


def judge_endpoint(facts: EndpointFacts) -> Judgement:
    """Whether its name resolves, and its host is reached. That nobody listens yet is no fault where a node of the job
    will: they start in any order."""
    judged = [_judge_place(each, facts) for each in facts.places]
    if not judged:
        return not_known(_NO_ENDPOINT)
    if len(judged) == 1:
        return judged[0]
    good = [each for each in judged if each.status != "FAIL"]
    text = "; ".join(each.fact for each in judged)
    if not good:
        return failed(text, judged[0].remedy)
    bad = [each for each in judged if each.status != "PASS"]
    return warned(text, bad[0].remedy) if bad else passed(text)


_NO_ENDPOINT = "there is no endpoint to check"


def _judge_place(place: PlaceFacts, facts: EndpointFacts) -> Judgement:
    where, found = place.endpoint, place.found
    failed_yet = warned if facts.joins else failed
    dns = "check the endpoint, DNS and /etc/hosts"
    if found.unanswered:
        return failed(
            f"nobody answers what {where.host} stands for within {found.took:.0f} s", f"see the DNS servers; {dns}"
        )
    if found.error:
        return failed_yet(f"{where.host} does not resolve ({found.error})", dns)
    reached = [*place.having(Outcome.ACCEPTED), *place.having(Outcome.REFUSED)]
    lost = [*place.having(Outcome.SILENT), *place.having(Outcome.UNREACHABLE)]
    lost += [] if reached else place.having(Outcome.NO_ROUTE)  # else the other family does
    text = f"{where}{' (this machine)' if place.is_here else ''}: {_words(place.attempts, where.host)}"
    if not facts.is_ours and reached and not place.having(Outcome.ACCEPTED):
        return failed_yet(text, "start etcd there, or take it out of the endpoint")
    if lost:
        remedy = "check the address, the routes and firewalls between the machines, and that the host is up"
        return warned(text, remedy) if reached else failed(text, remedy)
    if found.took >= SLOW:
        return warned(
            f"{text}; its look-up took {found.took:.1f} s", "take DNS servers that do not answer out of resolv.conf"
        )
    return passed(text)


_OUTCOMES = {
    Outcome.ACCEPTED: "accepts connections",
    Outcome.REFUSED: "is reached, and nobody listens at the port",
    Outcome.SILENT: "does not answer",
}


def _words(attempts: Sequence[Attempt], host: str) -> str:
    """How all attempts have ended, those alike together."""
    groups: dict[str, list[str]] = {}
    for each in attempts:
        groups.setdefault(_OUTCOMES.get(each.outcome) or f"cannot be reached ({each.words})", []).append(each.address)
    if list(groups.values()) == [[host]]:
        return next(iter(groups))
    return ", ".join(f"{', '.join(addresses)} {words}" for words, addresses in groups.items())


def judge_control_plane(facts: EndpointFacts) -> Judgement:
    """Whether Rallypoint answers at the endpoint, if anybody does."""
    answer = facts.answer
    if answer.refusal:
        return failed(answer.refusal, "")
    if answer.welcome:
        return passed(answer.welcome)
    return not_known(answer.absent or _NO_ENDPOINT)


def judge_clock(facts: EndpointFacts) -> Judgement:
    """How far the clock at the endpoint is from this one. Rallypoint itself compares no clocks; people do."""
    offset, uncertainty = facts.answer.offset, facts.answer.uncertainty
    if offset is None:
        return not_known("no control plane has told the time of day")
    way = "ahead of" if offset > 0 else "behind"
    text = f"the coordinator's clock is {abs(offset):.3f} s {way} this one's, give or take {uncertainty:.3f} s"
    sure = max(0.0, abs(offset) - uncertainty)
    if sure < MAX_OFFSET:
        return passed(text)
    remedy = "run chrony or another NTP client on both machines"
    return failed(text, remedy) if sure >= HOPELESS_OFFSET else warned(text, remedy)


def judge_port(facts: EndpointFacts) -> Judgement:
    """Whether an outgoing connection may take the port before the control plane listens there, or has."""
    if not facts.places or not facts.is_ours:
        return not_known("there is no endpoint at which Rallypoint would listen")
    place = facts.places[0]
    if not place.is_here:
        return not_known(f"{place.endpoint.host} is not this machine; run the check there")
    port, kernel = place.endpoint.port, facts.port
    if place.having(Outcome.ACCEPTED):
        return passed(f"somebody listens at port {port} (see control-plane)")
    if kernel.trouble:
        return failed(
            f"port {port} cannot be listened at ({kernel.trouble})", f"see who has it (`ss -tanp sport = :{port}`)"
        )
    low, high = kernel.ephemeral
    if not low <= port <= high:
        return passed(f"port {port} is outside the range of outgoing connections, {low}-{high}")
    text = f"port {port} is inside the range of outgoing connections, {low}-{high}"
    if any(first <= port <= last for first, last in kernel.reserved):
        return passed(f"{text}, and reserved")
    return warned(
        f"{text}: any of them may take it first",
        f"choose another port, or reserve it: `sysctl -w net.ipv4.ip_local_reserved_ports={port}`",
    )
