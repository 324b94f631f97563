"""The name of this machine: what it stands for here is what many programs take for its address."""

from __future__ import annotations

import socket
from typing import NamedTuple

from rallypoint.base.endpoint import host_name, is_local_address, is_loopback
from rallypoint.preflight.look_up import LOOK_UP, SLOW, LookUp, look_up
from rallypoint.preflight.results import Judgement, not_known, passed, warned
from rallypoint.preflight.table import Check, CheckInputs, Reading


class NameFacts(NamedTuple):
    """The machine's name, what it stands for, and those of the addresses that are not of this machine."""

    name: str
    found: LookUp
    foreign: tuple[str, ...] = ()
    alone: bool = False
    """Whether the job has no other node, which could be told the address."""


def read_host_name(inputs: CheckInputs) -> NameFacts:
    """Look this machine's own name up."""
    found = look_up(socket.gethostname())
    foreign = tuple(each for each in found.addresses if not is_local_address(each))
    return NameFacts(host_name(), found, foreign, inputs.max_nodes == 1)


def judge_host_name(facts: NameFacts) -> Judgement:
    """Gloo, and programs that call `socket.gethostname()`, give others the address that the name resolves to here."""
    if facts.alone:
        return not_known("the job has no other node that could be told an address")
    name, found = facts.name, facts.found
    remedy = f"give {name} the address by which other nodes reach this one, in DNS or /etc/hosts"
    if found.unanswered:
        return warned(
            f"nobody answers what {name} stands for within {found.took:.0f} s", f"see the DNS servers, or {remedy}"
        )
    if found.error:
        return warned(f"{name} does not resolve ({found.error})", remedy)
    text = f"{name} is {', '.join(found.addresses)}"
    if all(map(is_loopback, found.addresses)):
        return warned(f"{text}, a loopback address: other nodes that are told it reach themselves", remedy)
    if facts.foreign:
        return warned(f"{text}, of which {', '.join(facts.foreign)} is not an address of this machine", remedy)
    if found.took >= SLOW:
        return warned(f"{text}, after {found.took:.1f} s", "take DNS servers that do not answer out of resolv.conf")
    return passed(text)


HOST_NAME = Reading(
    read_host_name,
    (
        Check(
            "host-name",
            "The address to which this machine's name resolves here. Gloo and many other programs take it for the "
            "machine's address and pass it on to others; Debian's installer writes 127.0.1.1.",
            f"it does not resolve, or not within {LOOK_UP:.0f} s, or only after {SLOW:.0f} s; it is a loopback "
            "address, or another machine's",
            "",
            "an entry in DNS or /etc/hosts with the address by which other nodes reach this one",
            judge_host_name,
        ),
    ),
    warned("the look-up of this machine's own name does not end", "see the DNS servers"),
)
