"""Chooses the rendezvous of a command line, and its endpoint (contract section 1.5)."""

from __future__ import annotations

import os

from rallypoint.base.endpoint import parse_endpoint
from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.light_typing import Any, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.cli.parse import Options, naming
from rallypoint.rendezvous.params import C10D_PORT, ON_ETCD, parse_rdzv_conf

_log = get_logger(__name__)

STATIC_PORT = 29500

_RESERVED = ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr")
"""Options that the launcher itself sets."""


class RendezvousChoice(NamedTuple):
    """A rendezvous: `configs` are the backend's options, `node_rank` is the rank that this node requests, and
    `endpoint_flag` is where the user gave the endpoint, if `endpoint_given`.
    """

    backend: str
    endpoint: str
    run_id: str
    configs: dict[str, Any]
    node_rank: int | None
    endpoint_flag: str = "--rdzv-endpoint"
    endpoint_given: bool = True


def choose_rendezvous(options: Options, max_nodes: int) -> RendezvousChoice:
    """Follow the table of section 1.5 from top to bottom.

    Raises:
        UserError: an endpoint, an option of the backend or a node rank that cannot work.
    """
    configs: dict[str, Any] = dict(_configs(options))
    alone = options.standalone or _is_default_static(options, max_nodes)
    if configs:
        _warn_of_options(options, configs, "c10d" if options.standalone else options.rdzv_backend, alone)
    if options.store_peers:
        configs["store_peers"] = options.store_peers
    if alone:
        return _standalone(configs, announce=options.standalone)
    if options.rdzv_backend == "static":
        return _static(options, configs, max_nodes)
    source = options.source("rdzv_endpoint")
    if not options.rdzv_endpoint:
        _log.warning(
            "--rdzv-backend=%s without --rdzv-endpoint uses the backend's default; "
            "--master-addr and --master-port apply to static only",
            options.rdzv_backend,
        )
    elif options.rdzv_backend == "c10d" and str(configs.get("store_type", "tcp")).lower() == "tcp":
        with naming(source):
            parse_endpoint(options.rdzv_endpoint, C10D_PORT)
    elif options.rdzv_backend in ON_ETCD:
        from rallypoint.rendezvous.backends.etcd_options import endpoints_of

        with naming(source):
            endpoints_of(options.rdzv_endpoint)
    preferred_rank = options.node_rank if "node_rank" in options.sources else None
    return RendezvousChoice(
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id, configs, preferred_rank, source
    )


def _is_default_static(options: Options, max_nodes: int) -> bool:
    nowhere = not options.rdzv_endpoint and options.master_port is None
    return options.rdzv_backend == "static" and nowhere and max_nodes == 1


def _standalone(configs: dict[str, Any], announce: bool) -> RendezvousChoice:
    choice = RendezvousChoice("c10d", "localhost:0", _uuid4(), configs, None)
    if announce:
        bar = "*" * 38
        _log.info(
            "\n%s\nRendezvous info:\n--rdzv-backend=%s --rdzv-endpoint=%s --rdzv-id=%s\n%s\n",
            bar,
            choice.backend,
            choice.endpoint,
            choice.run_id,
            bar,
        )
    return choice


def _uuid4() -> str:
    """A random UUID (RFC 9562, version 4); the module `uuid` would cost more than the rest of this file."""
    number = int.from_bytes(os.urandom(16), "big") & ~(0xF000 << 64) & ~(0xC000 << 48) | 4 << 76 | 2 << 62
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _static(options: Options, configs: dict[str, Any], max_nodes: int) -> RendezvousChoice:
    rank = options.node_rank
    if not 0 <= rank < max_nodes:
        raise UsageError(
            f"{options.source('node_rank')}={rank} is out of range with --nnodes={max_nodes}; give each node its own, "
            f"from 0 to {max_nodes - 1}"
        )
    endpoint = options.rdzv_endpoint
    if endpoint:
        with naming(options.source("rdzv_endpoint")):
            parse_endpoint(endpoint, None)
    else:
        port = STATIC_PORT if options.master_port is None else options.master_port
        endpoint = f"{options.master_addr}:{port}"
        with naming(f"{options.source('master_addr')} and {options.source('master_port')}"):
            parse_endpoint(endpoint, None)
    source = options.source("rdzv_endpoint" if options.rdzv_endpoint else "master_addr")
    given = bool(options.rdzv_endpoint) or "master_addr" in options.sources
    return RendezvousChoice("static", endpoint, options.rdzv_id, configs | {"rank": rank}, None, source, given)


def _warn_of_options(options: Options, given: dict[str, Any], backend: str, alone: bool) -> None:
    """Warn of unknown options, except a plug-in's. A job that is `alone` uses c10d, whatever backend was given."""
    from rallypoint.rendezvous.backends.option_table import KNOWN

    if (known := KNOWN.get(backend)) is not None:
        from rallypoint.cli.unknown_names import warn_of_options

        warn_of_options(options.source("rdzv_conf"), given, backend, known | KNOWN["c10d"] if alone else known)


def _configs(options: Options) -> dict[str, str]:
    source = options.source("rdzv_conf")
    with naming(source):
        configs = parse_rdzv_conf(options.rdzv_conf)
    for key in _RESERVED:
        if key in configs:
            raise UserError(f"{source} has the key {key!r}, which has a flag of its own; use that")
    return configs
