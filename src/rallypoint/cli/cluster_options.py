"""`--cluster`: the environment of a cluster supplies values that the user did not set.

Laws:

1. Values from a flag or a `PET_*` variable take precedence. If the user sets an endpoint, nodes meet there.
2. A value that cannot be determined is reported in one sentence before anything starts. It ends the job (exit code 2),
   unless the flags suffice without it.
3. Without `--cluster` nothing changes, except for one warning if each node is about to run its own job.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from rallypoint.base.devices import cpu_count
from rallypoint.base.endpoint import Endpoint, is_loopback, parse_endpoint
from rallypoint.base.errors import UsageError, UserError, naming
from rallypoint.base.log import get_logger, printable
from rallypoint.base.private_files import open_regular
from rallypoint.base.procfs import local_port_range, read_text
from rallypoint.cli.parse import Options, parse_nnodes
from rallypoint.cli.worker_count import count_accelerators
from rallypoint.clusters.detect import find, job_file, started_with_others
from rallypoint.clusters.findings import Cluster, DetectionRefusal, Machine, NoCluster
from rallypoint.rendezvous.params import parse_rdzv_conf

_log = get_logger(__name__)

_MEETING = ("rdzv_endpoint", "master_addr", "master_port")
"""Options that say where nodes meet."""
_BY_ENDPOINT = ("c10d", "static")
"""Backends whose nodes meet at a node of the job."""
_MOST = 1 << 20
"""Maximum number of characters to read from a file."""


def with_cluster(options: Options, environ: Mapping[str, str], machine: Machine) -> Options:
    """Complete the options with values of the cluster that `--cluster` names. Raises UsageError: the cluster's
    environment is damaged, or not sufficient to start a job.
    """
    which = options.features.command.cluster
    source = f"{options.source('cluster')}={which}"
    with naming(source):
        finding = find(which, environ, machine)
        if isinstance(finding, Cluster):
            return _completed(options, finding, environ)
    says_enough = options.standalone or _meets_somewhere(options)
    if isinstance(finding, DetectionRefusal) and not says_enough:
        raise UsageError(f"{source}: {finding.sentence}")
    if isinstance(finding, NoCluster) and which != "auto":
        raise UsageError(f"{source}: {finding.sentence}")
    say = _log.info if says_enough or "nnodes" in options.sources else _log.warning
    say("%s has no effect (--nnodes=%s): %s", source, options.nnodes, finding.sentence)
    return options


def _meets_somewhere(options: Options) -> bool:
    return any(dest in options.sources for dest in _MEETING)


def this_machine(environ: Mapping[str, str]) -> Machine:
    return Machine(
        hostname=socket.gethostname(),
        hosts_file=read_text("/etc/hosts", _MOST),
        ephemeral=local_port_range(),
        cpu_quota=read_text("/sys/fs/cgroup/cpu.max"),
        job_file=_foreign_text(job_file(environ)),
    )


def _foreign_text(path: str) -> str:
    """The text of a file named in a variable; empty unless root or this user owns the file."""
    if not path:
        return ""
    try:
        with open(open_regular(path), encoding="utf-8", errors="replace") as file:
            return file.read(_MOST)
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        _log.info("%s, which describes the job, cannot be read: %s", printable(path), error)
        return ""


def _completed(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> Options:
    values: dict[str, Any] = {}
    if not options.standalone:
        if "nnodes" not in options.sources:
            if cluster.nodes is None:
                raise UsageError(cluster.wanted["nnodes"])
            values["nnodes"] = str(cluster.nodes)
        _, most = parse_nnodes(values.get("nnodes", options.nnodes), options.source("nnodes"))
        if most > 1:
            values |= _rendezvous(options, cluster)
    workers, origin = _workers(options, cluster, environ)
    if workers:
        values["nproc_per_node"] = workers
    origins = {dest: cluster.origins.get(dest, options.source("cluster")) for dest in values} | {
        "nproc_per_node": origin
    }
    sources = {**options.sources, **{dest: origins[dest] for dest in values}}
    derived = " ".join(f"--{dest.replace('_', '-')}={value}" for dest, value in values.items())
    _log.info("%s, node %d: %s", cluster.title, cluster.index, derived or "all values were already set")
    if cluster.index == 0:
        _warn(cluster, "rdzv_endpoint" in values, int(workers or 1))
    return options.replace(**values, sources=sources)


def _warn(cluster: Cluster, endpoint_derived: bool, workers: int) -> None:
    """Warn, on one node, about settings that work but are probably not intended."""
    if cluster.remark and endpoint_derived:
        _log.warning("%s: %s", cluster.title, cluster.remark)
    usable, there = cpu_count(), cluster.cpus or os.cpu_count() or 1
    if cluster.unbind and workers <= usable and 2 * usable <= there:  # `sharing` warns about more workers
        _log.warning(
            "%s: the task on this node, with all of its workers, may use only %d of %d processors; %s",
            *(cluster.title, usable, there, cluster.unbind),
        )


def _rendezvous(options: Options, cluster: Cluster) -> dict[str, Any]:
    values: dict[str, Any] = {}
    backend = options.rdzv_backend if "rdzv_backend" in options.sources else "c10d"
    with naming(options.source("rdzv_conf")):
        conf = parse_rdzv_conf(options.rdzv_conf)
    if backend in _BY_ENDPOINT and not _meets_somewhere(options) and "store_type" not in conf:
        if not cluster.host:
            raise UsageError(cluster.wanted["rdzv_endpoint"])
        values["rdzv_backend"] = backend
        values["rdzv_endpoint"] = str(Endpoint(cluster.host, cluster.port))
        if backend == "c10d" and cluster.hosts_here and "is_host" not in conf:
            values["rdzv_conf"] = ",".join(filter(None, (options.rdzv_conf, "is_host=true")))
    if "rdzv_id" not in options.sources and cluster.job_id:
        values["rdzv_id"] = cluster.job_id
    if "node_rank" not in options.sources:
        values["node_rank"] = cluster.index
    return {dest: value for dest, value in values.items() if value != getattr(options, dest) or dest == "node_rank"}


def _workers(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> tuple[str, str]:
    """The number of workers to start on this node, and its source; empty if the user set it.

    The number is the one for `auto`, restricted to the part of this machine that the task may use.
    """
    option = options.nproc_per_node if "nproc_per_node" in options.sources else "auto"
    if option != "auto":
        return "", ""
    try:
        gpus = count_accelerators(environ, f"{options.source('nproc_per_node')}=auto")
    except UserError:
        if not cluster.gpus:
            raise
        gpus = 0
    # With an unknown driver, no devices are counted: use the scheduler's value.
    gpus = gpus if cluster.gpus is None else min(gpus or cluster.gpus, cluster.gpus)
    if gpus:
        return str(gpus), "the task's GPUs"
    return str(min(cpu_count(), cluster.cpus or cpu_count())), "the task's processors"


def warn_of_own_worlds(options: Options, environ: Mapping[str, str]) -> None:
    """Warn, on one of several nodes, if each is about to run its own job or to wait for itself."""
    started = None if options.standalone or "TORCHELASTIC_RUN_ID" in environ else started_with_others(environ)
    if started is None or started.number != 0:
        return
    try:
        _, most = parse_nnodes(options.nnodes)
        where = parse_endpoint(options.rdzv_endpoint or options.master_addr, 0).host
    except UserError:
        return  # reported where the value is checked
    if most == 1:
        _log.warning(
            "%s has %d nodes, but %s is 1, so each node runs a job of its own; use --cluster=%s to run one job, or "
            "--standalone if you want separate jobs",
            *(started.title, started.nodes, options.source("nnodes"), started.flag),
        )
    elif options.rdzv_backend in _BY_ENDPOINT and (where == "localhost" or is_loopback(where)):
        _log.warning(
            "%s has %d nodes, but each of them would find only itself at %s; use --cluster=%s without an endpoint, or "
            "set --rdzv-endpoint=HOST:PORT with the name of the first node",
            *(started.title, started.nodes, where, started.flag),
        )
