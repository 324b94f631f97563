"""Every key of `--rdzv-conf`: what it means, and to which backends. Pure.

Imported where options are given, to warn of those that a backend does not know, and to make the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.light_typing import NamedTuple

STATIC, C10D, ETCD_V2, ETCD = "static", "c10d", "etcd-v2", "etcd"

_ALL = (STATIC, C10D, ETCD, ETCD_V2)
_ELASTIC = (C10D, ETCD, ETCD_V2)
_HOSTING = (STATIC, C10D, ETCD)
_STORING = (C10D, ETCD_V2)
_ON_ETCD = (ETCD, ETCD_V2)


class OptionText(NamedTuple):
    """One key. `default` is as people write it, with its unit; `beyond_torchrun`: torchrun does not read it."""

    name: str
    default: str
    backends: tuple[str, ...]
    meaning: str
    beyond_torchrun: bool = False


OPTIONS = (
    OptionText(
        "join_timeout",
        "600 s",
        _ELASTIC,
        "Time to wait for other nodes. When it has passed for a node without which there are too few, all waiting "
        "nodes end with one message.",
    ),
    OptionText("timeout", "900 s", (STATIC,), "The same for static ranks."),
    OptionText(
        "last_call_timeout", "30 s", _ELASTIC, "Time that a first round with enough nodes, but not all, waits for more."
    ),
    OptionText(
        "is_host",
        "inferred",
        (C10D,),
        "Whether this node hosts the control plane, or the shared file. If not given, the node that has the endpoint's "
        "address does.",
    ),
    OptionText(
        "store_type",
        "`tcp`",
        (C10D,),
        "`file`: the nodes meet in a shared file, whose path is `--rdzv-endpoint`, and not at a port.",
    ),
    OptionText(
        "rank", "none", _ELASTIC, "The group rank that this node would like to have. `--node-rank` takes precedence."
    ),
    OptionText(
        "keep_alive_interval",
        "5 s",
        _STORING,
        "Time between two heartbeats in a shared file and with `etcd-v2`.",
    ),
    OptionText(
        "keep_alive_max_attempt",
        "3",
        _STORING,
        "Number of heartbeats in a row that may be missing there before the node counts as gone.",
    ),
    OptionText(
        "heartbeat_timeout",
        "5 s",
        _STORING,
        "With `etcd-v2`, a request may take the lesser of this and `read_timeout`.",
    ),
    OptionText("read_timeout", "60 s", _STORING, "See `heartbeat_timeout`. Checked, and of no effect, with `c10d`."),
    OptionText("close_timeout", "30 s", _STORING, "Checked, and of no effect: closing a rendezvous waits for nobody."),
    OptionText(
        "protocol", "`http`", _ON_ETCD, "How etcd is reached: `http` or `https`. A certificate implies `https`."
    ),
    OptionText("cacert", "none", _ON_ETCD, "PEM file of the authorities that etcd's certificate is checked against."),
    OptionText("cert", "none", _ON_ETCD, "PEM file of the certificate that this node shows to etcd."),
    OptionText("key", "none", _ON_ETCD, "PEM file of the key of `cert`."),
    OptionText("ca_cert", "none", _ON_ETCD, "Another name of `cacert`."),
    OptionText("ssl_cert", "none", _ON_ETCD, "Another name of `cert`."),
    OptionText("ssl_cert_key", "none", _ON_ETCD, "Another name of `key`."),
    OptionText("user", "none", _ON_ETCD, "User of etcd.", beyond_torchrun=True),
    OptionText(
        "password",
        "none",
        _ON_ETCD,
        "That user's password. All users of the machine can read a command line: give "
        "`RALLYPOINT_ETCD_PASSWORD_FILE` instead.",
        beyond_torchrun=True,
    ),
    OptionText("prefix", "`/rallypoint`", (ETCD,), "Prefix of the keys of all jobs.", beyond_torchrun=True),
    OptionText(
        "etcd_prefix", "`/torch/elastic/rendezvous`", (ETCD_V2,), "Prefix of the key in which the state of the job is."
    ),
    OptionText(
        "listen",
        "inferred",
        _HOSTING,
        "Where this node listens if it hosts the control plane: an address or name of its own, or `any` for all "
        "interfaces. If not given, at the address that the endpoint names.",
        beyond_torchrun=True,
    ),
    OptionText(
        "remote_control",
        "`false`",
        _HOSTING,
        "Whether commands (`rallyctl restart`, ...) are taken from other machines where there is no secret.",
        beyond_torchrun=True,
    ),
    OptionText(
        "tls_cert",
        "none",
        _HOSTING,
        "PEM file of this node's certificate, for TLS between nodes and control plane. Needs `tls_key` and `tls_ca`.",
        beyond_torchrun=True,
    ),
    OptionText("tls_key", "none", _HOSTING, "PEM file of its key, without a passphrase.", beyond_torchrun=True),
    OptionText("tls_ca", "none", _HOSTING, "PEM file of the authorities of the other side.", beyond_torchrun=True),
    OptionText(
        "tls_peer",
        "the endpoint's host",
        _HOSTING,
        "The name that the other side's certificate must have: a DNS name, or a URI such as `spiffe://cluster/job7`.",
        beyond_torchrun=True,
    ),
    OptionText(
        "lease", "3 s", _ALL, "Time after which a silent node counts as gone, 0.1 s at least.", beyond_torchrun=True
    ),
    OptionText(
        "notice_timeout",
        "0 s",
        _ALL,
        "Time that workers have to save before a change of membership restarts them, or a preemption ends them.",
        beyond_torchrun=True,
    ),
    OptionText(
        "failure_grace",
        "5 s",
        _ALL,
        "Time from SIGTERM to SIGKILL after a failure, where `--shutdown-timeout` is not less.",
        beyond_torchrun=True,
    ),
    OptionText(
        "restart_backoff",
        "0 s",
        _ALL,
        "Time by which a restart without progress is delayed, doubled each time.",
        beyond_torchrun=True,
    ),
    OptionText("restart_backoff_max", "300 s", _ALL, "The most that such a delay may grow to.", beyond_torchrun=True),
    OptionText(
        "same_failure_limit",
        "0",
        _ALL,
        "How often the same first failure may come back without progress before the job ends; 0 for any number.",
        beyond_torchrun=True,
    ),
    OptionText(
        "min_healthy_time",
        "60 s",
        _ALL,
        "Time that a round must run to count as progress for `restart_backoff` and `same_failure_limit`, where the job "
        "does not report progress.",
        beyond_torchrun=True,
    ),
    OptionText("store_peers", "the members", _ALL, "As `--store-peers`, which takes precedence.", beyond_torchrun=True),
)
"""The keys, those of torchrun first. What a plug-in reads, it knows."""

KNOWN: Mapping[str, frozenset[str]] = {
    backend: frozenset(option.name for option in OPTIONS if backend in option.backends) for backend in _ALL
}
"""Backend to the options that mean something to it, or to torchrun's of that name."""
