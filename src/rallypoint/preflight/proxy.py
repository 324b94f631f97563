"""Proxy variables that would divert connections to the endpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from rallypoint.preflight.results import Judgement, not_known, passed, warned
from rallypoint.preflight.table import Check, CheckInputs, Reading

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


class ProxyFacts(NamedTuple):
    """Which variables are set, what they spare, and the hosts that are to be reached without."""

    variables: tuple[str, ...]
    no_proxy: str
    hosts: tuple[str, ...]


def read_proxy(inputs: CheckInputs) -> ProxyFacts:
    """Read the environment."""
    return proxy_facts(os.environ, inputs)


def proxy_facts(environ: Mapping[str, str], inputs: CheckInputs) -> ProxyFacts:
    """The same of an environment. Values of the variables are not kept: they may hold a password."""
    names = [name for each in VARIABLES for name in (each, each.upper()) if environ.get(name)]
    spared = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"))
    return ProxyFacts(tuple(names), spared, tuple(dict.fromkeys(host for host, _ in inputs.endpoints)))


def judge_proxy(facts: ProxyFacts) -> Judgement:
    """Rallypoint itself takes no proxy; gRPC, requests and curl do, towards etcd and other nodes."""
    if not facts.variables:
        return passed("no proxy variable is set")
    names = ", ".join(facts.variables)
    if not facts.hosts:
        return not_known(f"{names} set, and no endpoint is given that they could divert")
    caught = [each for each in facts.hosts if not is_spared(each, facts.no_proxy)]
    if not caught:
        return passed(f"{names} set, and no_proxy spares {', '.join(facts.hosts)}")
    return warned(
        f"{names} set, and no_proxy does not spare {', '.join(caught)}: gRPC, requests and curl would go through the "
        "proxy",
        f"add {','.join(caught)}, and the other nodes, to no_proxy",
    )


def is_spared(host: str, no_proxy: str) -> bool:
    """Whether `no_proxy` spares a host: by its name, a domain that it ends with, its address or network, or `*`."""
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


PROXY = Reading(
    read_proxy,
    (
        Check(
            "proxy",
            "`http_proxy`, `https_proxy`, `all_proxy` and `grpc_proxy`, in lower or upper case, compared with "
            "`no_proxy`. Rallypoint itself uses no proxy, but gRPC, requests and curl in workers do.",
            "one is set, and `no_proxy` does not exclude the endpoint's host",
            "",
            "add the nodes to `no_proxy`",
            judge_proxy,
        ),
    ),
    not_known("the environment could not be read in time"),
)
