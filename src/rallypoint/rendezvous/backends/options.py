"""Converts a backend's parameters to a rendezvous's settings (contract section 4.2)."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Mapping, Sequence

from rallypoint.base.endpoint import Endpoint, listening_addresses, listening_sockets, resolve
from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.base.secrets import job_secret
from rallypoint.control.membership.state import Settings
from rallypoint.control.protocol.ranges import MAX_LINE, is_in_range, range_of
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.worker_stores import AgentStoreSupply, WorkerHostedStores, WorkerStoreSupply

if TYPE_CHECKING:
    import socket

    from rallypoint.base.tls import ControlTls
    from rallypoint.control.coordinator.store_peers import PeerPolicy
    from rallypoint.control.protocol.handshake import Keys

log = get_logger(__name__)

_DEFAULTS = Settings._field_defaults
"""The only definition of the defaults of options that are a job's settings."""
_WHOLE = (
    *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
"""Options with positive integer values, as in torch."""
_SECONDS = ("lease", "notice_timeout", "min_healthy_time", "restart_backoff", "restart_backoff_max")
"""Options unknown to torch, in seconds, with fractions."""

_TLS = ("tls_cert", "tls_key", "tls_ca", "tls_peer")
"""The control plane's TLS options, for all our servers."""

_REMOTE_CONTROL = "remote_control"
"""Option: whether a coordinator in this agent without a secret accepts commands from other machines."""

_LISTEN = "listen"
"""Option: where a coordinator in this agent listens: an address or name of this machine, or `any` interface."""


def check_run_id(run_id: str) -> None:
    """Raise UserError if the id could not be sent, or would change on arrival (`control.protocol.validation`)."""
    if not run_id.isprintable():  # bytes that are not UTF-8 are also unprintable
        raise UserError(f"the run id {run_id!r} contains unprintable characters; choose one without them (--rdzv-id)")
    if len(run_id.encode()) > MAX_LINE:
        raise UserError(f"the run id has more than {MAX_LINE} bytes; choose a shorter one (--rdzv-id)")


def settings_of(
    params: RendezvousParameters,
    *,
    join_timeout_key: str = "join_timeout",
    fixed_ranks: bool = False,
    counts_heartbeats: bool = False,
) -> Settings:
    """Read the settings from a backend's parameters.

    Args:
        params: the backend's parameters.
        join_timeout_key: the option that sets the seconds to wait for others.
        fixed_ranks: see `Settings`.
        counts_heartbeats: see `Settings`.

    Raises:
        UserError: a time is not a positive whole number, or the run id is empty.
    """
    if not params.run_id and not fixed_ranks:
        raise UserError("the run id is empty; set one, the same on all nodes (--rdzv-id)")
    check_run_id(params.run_id)
    _positive(params, "read_timeout", 60)  # checked but unused: one join deadline limits connecting
    times: dict[str, Any] = {name: _positive(params, name, _DEFAULTS[name]) for name in _WHOLE}
    if join_timeout_key != "join_timeout":
        times["join_timeout"] = _positive(params, join_timeout_key, times["join_timeout"])
    segment = 1
    if (segment_option := params.get("segment")) is not None:
        from rallypoint.control.membership.segments import checked_size

        segment = checked_size(segment_option, params.min_nodes, fixed_ranks=fixed_ranks)
    restarts, window = 0, 0.0
    if (budget := params.get("restart_budget")) is not None:
        from rallypoint.base.restart_budget import read_budget

        restarts = read_budget(str(budget))
        window = restarts.window
    settings = Settings(
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes - params.max_nodes % segment,
        cas_backoff_max_seconds=_backoff(params, "cas_backoff_max_seconds"),
        same_failure_limit=_count(params, "same_failure_limit"),
        retry_all=bool(params.get_as_bool("retry_all")),
        remote_control=not counts_heartbeats and bool(params.get_as_bool(_REMOTE_CONTROL)),
        fixed_ranks=fixed_ranks,
        counts_heartbeats=counts_heartbeats,
        segment=segment,
        restart_window=window,
        restarts_in_window=int(restarts),
    )
    others: dict[str, Any] = {name: params.get_as_seconds(name, _DEFAULTS[name]) for name in _SECONDS}
    settings = settings._replace(**times, **others)
    for name, value in settings._asdict().items():
        if isinstance(value, (int, float)) and not is_in_range(name, value):
            segment_option = join_timeout_key if name == "join_timeout" else name
            least, most = range_of(name)
            raise UsageError(f"rendezvous option {segment_option}={value} is out of range; use {least} to {most}")
    return settings


def _positive(params: RendezvousParameters, name: str, default: int) -> int:
    value = params.get_as_int(name, default)
    assert value is not None
    if value <= 0:
        raise UserError(
            f"rendezvous option {name}={value} is not positive; use a value such as {name}=30 in --rdzv-conf"
        )
    return value


def _backoff(params: RendezvousParameters, name: str) -> float:
    value = params.get(name, 0.0)
    try:
        longest = float(value)
    except (TypeError, ValueError):
        longest = math.nan
    if not range_of(name).minimum <= longest < math.inf:
        raise UserError(
            f"rendezvous option {name}={value!r} is not a number of seconds; use 0 or more, such as {name}=0.5"
        )
    return longest


def _count(params: RendezvousParameters, name: str) -> int:
    try:
        count = params.get_as_int(name, 0)
    except UserError as error:
        raise UsageError(str(error)) from None
    assert count is not None
    if count < range_of(name).minimum:
        raise UsageError(
            f"rendezvous option {name}={count} is negative; in --rdzv-conf, set it to 0 to switch it off, or to 1 or "
            "more"
        )
    return count


def job_key(job: str) -> bytes | None:
    """Read the key that a node of the job must prove to have from `RALLYPOINT_SECRET`; None without a secret.

    Raises:
        UserError: the secret cannot be used (`base.secrets.job_secret`).
    """
    secret = job_secret()
    return None if secret is None else secret.keys(job)[0]


def control_tls(options: Mapping[str, object]) -> ControlTls | None:
    """Read the control plane's TLS from the options `tls_cert`, `tls_key`, `tls_ca` and `tls_peer`; None without any.

    Raises:
        UserError: one of the first three is missing, or a file cannot be loaded.
    """
    files = {name: str(options.get(name) or "") for name in _TLS}
    if not any(files.values()):
        return None
    missing = [name for name in _TLS[:3] if not files[name]]
    if missing:
        raise UserError(
            "TLS needs tls_cert, tls_key and tls_ca, because both sides present a certificate; set "
            f"{' and '.join(missing)}"
        )
    from rallypoint.base.tls import ControlTls, TlsFiles

    return ControlTls(TlsFiles(files["tls_cert"], files["tls_key"], files["tls_ca"], files["tls_peer"]))


def accepted_keys() -> Keys | None:
    """Keys that a coordinator accepts from nodes; None without a secret. Raises the same as `job_key`."""
    secret = job_secret()
    return None if secret is None else secret.keys


def control_listeners(
    params: RendezvousParameters, hosts: Sequence[str], port: int, *, only_here: bool = False
) -> list[socket.socket]:
    """Open the sockets of a coordinator in this agent, only on the addresses that others use for this machine.

    Args:
        params: the backend's parameters; the option `listen` replaces these addresses, and `local_addr` adds one.
        hosts: names and addresses where other nodes look for the coordinator.
        port: 0 lets the kernel choose.
        only_here: whether all nodes are on this machine.

    Raises:
        UserError: `listen` is no address of this machine.
        OSError: the port is taken.
    """
    listen = str(params.get(_LISTEN) or "")
    if listen:
        return _chosen_listeners(listen, port)
    addresses = [listening_addresses(host, only_here=only_here or params.max_nodes == 1) for host in hosts]
    if params.local_addr:
        addresses.append(listening_addresses(params.local_addr, only_here=True))
    return listening_sockets([] if [] in addresses else list(dict.fromkeys(itertools.chain(*addresses))), port)


def _chosen_listeners(listen: str, port: int) -> list[socket.socket]:
    try:
        return listening_sockets([] if listen == "any" else resolve(listen), port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise UserError(
            f"rendezvous option {_LISTEN}={listen!r} is not an address of this machine ({error.strerror}); use one of "
            "its addresses, or any for all"
        ) from None


def refuse_unknown_port(params: RendezvousParameters, endpoint: Endpoint) -> None:
    """Raise UserError if the kernel would choose the port, and the job needs nodes that cannot know it."""
    nodes = params.max_nodes if params.backend == "static" else params.min_nodes
    if endpoint.port == 0 and nodes > 1:
        flag = params.endpoint_flag.replace("addr", "port").replace("ADDR", "PORT")
        raise UserError(
            f"the job needs {nodes} nodes, but the other nodes cannot know the port that the kernel chooses on "
            f"{endpoint.host} (port 0); set the same port on all nodes with {flag}"
        )


def endpoint_words(endpoint: Endpoint, only_here: bool) -> str:
    """Describe the meeting place in messages to waiting nodes."""
    return f"at {endpoint}{' (which other machines cannot reach)' if only_here else ''}"


def worker_stores(params: RendezvousParameters, *, only_here: bool = False) -> WorkerStoreSupply:
    """Create the supply of worker stores that are not at the endpoint (contract section 2.1).

    Args:
        params: the backend's parameters.
        only_here: whether all nodes, even if several, are on this machine.
    """
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        if params.get("store_peers"):
            log.warning(
                "--store-peers has no effect with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: workers then open the store "
                "themselves, and anyone can connect to it; unset that variable"
            )
        return WorkerHostedStores(params.local_addr or "")
    only_here = only_here or params.max_nodes == 1
    return AgentStoreSupply(
        params.local_addr or "", only_here=only_here, peers=store_peers(params, only_here=only_here)
    )


def store_peers(params: RendezvousParameters, *, only_here: bool) -> PeerPolicy | None:
    """Read the peers that may connect to worker stores from the option `store_peers`; None if unset and no others can.

    Raises:
        UsageError: the option is neither `members`, `any` nor networks.
    """
    peers = str(params.get("store_peers") or "")
    if only_here and not peers:
        return None
    from rallypoint.control.coordinator.store_peers import parse_policy

    return parse_policy(peers)


def rank_hint(params: RendezvousParameters) -> int | None:
    """Read the group rank that the node requests, if any.

    Raises:
        UserError: the value is not a whole number of at least 0.
    """
    rank = params.get_as_int("rank")
    if rank is not None and rank < range_of("rank_hint").minimum:
        raise UsageError(f"node rank {rank} is negative; node ranks start at 0")
    if rank is not None and not is_in_range("rank_hint", rank):
        raise UsageError(f"node rank {rank} is out of range; the maximum is {range_of('rank_hint').maximum}")
    return rank
