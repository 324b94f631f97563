"""All keys of `--rdzv-conf`, with their meanings and backends. Pure.

Imported if options are set, to warn about unknown ones, and for the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.membership.state import Settings
from rallypoint.control.protocol.ranges import range_of
from rallypoint.rendezvous.params import BACKENDS, ON_ETCD

STATIC, C10D, ETCD_V2 = "static", "c10d", "etcd-v2"

_ALL = tuple(BACKENDS)
_ELASTIC = tuple(name for name in _ALL if name != STATIC)
_STORING = (C10D, ETCD_V2)
"""torch's backends whose nodes write heartbeats to a store; ours do so only with a shared file."""


def _default(name: str) -> str:
    """A setting's default, as people write it, with the unit of seconds."""
    value = Settings._field_defaults[name]
    match value:
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"{value:g} s"
        case _:
            return str(value)


class OptionText(NamedTuple):
    """One key. `default` is as people write it, with its unit; `beyond_torchrun`: unknown to torchrun."""

    name: str
    default: str
    backends: tuple[str, ...]
    meaning: str
    beyond_torchrun: bool = False


OPTIONS = (
    OptionText(
        "join_timeout",
        _default("join_timeout"),
        _ELASTIC,
        "Time to wait for other nodes. If it expires for a node that is needed for the minimum, all waiting nodes exit "
        "with one message.",
    ),
    OptionText("timeout", "900 s", (STATIC,), "Time to wait for other nodes with static ranks."),
    OptionText(
        "last_call_timeout",
        _default("last_call_timeout"),
        _ELASTIC,
        "Time that the first round waits for more nodes after it reaches the minimum.",
    ),
    OptionText(
        "is_host",
        "inferred",
        (C10D,),
        "Whether this node hosts the control plane or the shared file. By default, the node with the endpoint's "
        "address does.",
    ),
    OptionText(
        "store_type",
        "`tcp`",
        (C10D,),
        "`file`: the nodes meet in a shared file instead of at a port. Set `--rdzv-endpoint` to its path.",
    ),
    OptionText("rank", "none", _ELASTIC, "Preferred group rank of this node. `--node-rank` takes precedence."),
    OptionText(
        "keep_alive_interval",
        _default("keep_alive_interval"),
        _STORING,
        "Time between heartbeats in a shared file.",
    ),
    OptionText(
        "keep_alive_max_attempt",
        _default("keep_alive_max_attempt"),
        _STORING,
        "Number of consecutive missed heartbeats in a shared file after which a node counts as lost.",
    ),
    OptionText(
        "cas_backoff_max_seconds",
        _default("cas_backoff_max_seconds"),
        _STORING,
        "Maximum random pause after a late write to a shared file, for jobs in which many nodes join at once.",
    ),
    OptionText("heartbeat_timeout", _default("heartbeat_timeout"), _STORING, "Validated but has no effect."),
    OptionText("read_timeout", "60 s", _STORING, "Validated but has no effect."),
    OptionText(
        "close_timeout",
        _default("close_timeout"),
        _STORING,
        "Validated but has no effect: closing a rendezvous does not wait.",
    ),
    OptionText("protocol", "`http`", ON_ETCD, "Protocol for etcd: `http` or `https`. A certificate implies `https`."),
    OptionText("cacert", "none", ON_ETCD, "PEM file of the certificate authorities for etcd's certificate."),
    OptionText("cert", "none", ON_ETCD, "PEM file of the certificate that this node presents to etcd."),
    OptionText("key", "none", ON_ETCD, "PEM file of the key of `cert`."),
    OptionText("ca_cert", "none", ON_ETCD, "Another name for `cacert`."),
    OptionText("ssl_cert", "none", ON_ETCD, "Another name for `cert`."),
    OptionText("ssl_cert_key", "none", ON_ETCD, "Another name for `key`."),
    OptionText("user", "none", ON_ETCD, "etcd user.", beyond_torchrun=True),
    OptionText(
        "password",
        "none",
        ON_ETCD,
        "Password of the etcd user. All users of the machine can read a command line, so set "
        "`RALLYPOINT_ETCD_PASSWORD_FILE` instead.",
        beyond_torchrun=True,
    ),
    OptionText("prefix", "`/rallypoint`", ON_ETCD, "Prefix of the keys of all jobs.", beyond_torchrun=True),
    OptionText("etcd_prefix", "none", ON_ETCD, "Another name for `prefix`."),
    OptionText(
        "listen",
        "inferred",
        _ALL,
        "Where this node listens if it hosts the control plane: one of its own addresses or names, or `any` for all "
        "interfaces. By default, it listens on the endpoint's address.",
        beyond_torchrun=True,
    ),
    OptionText(
        "remote_control",
        _default("remote_control"),
        _ALL,
        "Whether to accept commands (`rallyctl restart`, ...) from other machines without a secret.",
        beyond_torchrun=True,
    ),
    OptionText(
        "tls_cert",
        "none",
        _ALL,
        "PEM file of this node's certificate, for TLS between nodes and control plane. Needs `tls_key` and `tls_ca`.",
        beyond_torchrun=True,
    ),
    OptionText("tls_key", "none", _ALL, "PEM file of the key for `tls_cert`, no passphrase.", beyond_torchrun=True),
    OptionText(
        "tls_ca", "none", _ALL, "PEM file of the certificate authorities for the other side.", beyond_torchrun=True
    ),
    OptionText(
        "tls_peer",
        "the endpoint's host",
        _ALL,
        "Name that the other side's certificate must have: a DNS name, or a URI such as `spiffe://cluster/job7`.",
        beyond_torchrun=True,
    ),
    OptionText(
        "lease",
        _default("lease"),
        _ALL,
        f"Time after which a silent node counts as lost, at least {range_of('lease').minimum:g} s.",
        beyond_torchrun=True,
    ),
    OptionText(
        "notice_timeout",
        _default("notice_timeout"),
        _ALL,
        "Time for workers to save before a membership change restarts them or a preemption ends them. With 0, they "
        "get no notice, except with `--preempt-signals` (60 s) and `--stop-before-end`.",
        beyond_torchrun=True,
    ),
    OptionText(
        "failure_grace",
        "5 s",
        _ALL,
        "Time from SIGTERM to SIGKILL after a failure, unless `--shutdown-timeout` is shorter.",
        beyond_torchrun=True,
    ),
    OptionText("restart_budget", "none", _ALL, "Set by `--max-restarts=N/TIME`.", beyond_torchrun=True),
    OptionText(
        "restart_backoff",
        _default("restart_backoff"),
        _ALL,
        "Delay of a restart after a round without progress. It doubles each time.",
        beyond_torchrun=True,
    ),
    OptionText(
        "restart_backoff_max", _default("restart_backoff_max"), _ALL, "Maximum of this delay.", beyond_torchrun=True
    ),
    OptionText(
        "same_failure_limit",
        _default("same_failure_limit"),
        _ALL,
        "Number of times that a first failure can recur without progress before the job ends; 0: no limit.",
        beyond_torchrun=True,
    ),
    OptionText(
        "retry_all",
        _default("retry_all"),
        _ALL,
        "Whether to retry a failure that no restart can fix (a missing module, a syntax error, wrong arguments) as "
        "often as any other. By default, it is retried once.",
        beyond_torchrun=True,
    ),
    OptionText(
        "min_healthy_time",
        _default("min_healthy_time"),
        _ALL,
        "Time that a round must run to count as progress for `restart_backoff` and `same_failure_limit`, if the job "
        "does not report progress.",
        beyond_torchrun=True,
    ),
    OptionText(
        "segment", _default("segment"), _ELASTIC, "See `--segment`, which takes precedence.", beyond_torchrun=True
    ),
    OptionText(
        "store_peers", "the members", _ALL, "See `--store-peers`, which takes precedence.", beyond_torchrun=True
    ),
)
"""All keys, torchrun's first. A plug-in knows its own keys."""

KNOWN: Mapping[str, frozenset[str]] = {
    backend: frozenset(option.name for option in OPTIONS if backend in option.backends) for backend in _ALL
}
"""The options that a backend, or torchrun's backend with that name, knows."""
