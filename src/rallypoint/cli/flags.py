"""Every flag of the command line, as one table (contract section 1.1): torchrun's, and those of `agent.options`.

The parser, the reading of `PET_*` variables and the help page all come from here.
"""

from __future__ import annotations

from rallypoint.agent import options
from rallypoint.base.flags import (
    SWITCH,
    Flag,
    FlagGroup,
    number,
    signal_names,
    split_filters,
    whole_number,
)


def _backends() -> tuple[str, ...]:
    from rallypoint.rendezvous.handler import rendezvous_handler_registry

    return rendezvous_handler_registry.names()


def _backend_options() -> tuple[str, ...]:
    from rallypoint.rendezvous.backends.option_table import OPTIONS

    return tuple(sorted(f"{option.name}=" for option in OPTIONS))


def _log_layouts() -> tuple[str, ...]:
    from rallypoint.base.plugins import entry_point_names
    from rallypoint.workers.logs.specs import PLUGIN_GROUP

    return tuple(sorted({"default", *entry_point_names(PLUGIN_GROUP)}))


GROUPS = (
    FlagGroup(
        "nodes and rendezvous",
        "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job1 train.py",
        (
            Flag("--nnodes", str, "Number of nodes: N, or MIN:MAX for an elastic job", "N", default="1:1"),
            Flag(
                "--rdzv-backend",
                str,
                "Rendezvous backend: static, c10d (a file with --rdzv-conf=store_type=file), etcd, etcd-v2, a plug-in",
                "NAME",
                default="static",
                complete=_backends,
            ),
            Flag(
                "--rdzv-endpoint",
                str,
                "Rendezvous address; default port 29400 (c10d) or 2379 (etcd, or a list); a path with store_type=file",
                "HOST:PORT",
                default="",
            ),
            Flag("--rdzv-id", str, "The job's id, the same on all its nodes", "ID", default="none"),
            Flag(
                "--rdzv-conf",
                str,
                "Options of the backend, such as join_timeout=600,is_host=true",
                "KEY=VALUE,...",
                default="",
                complete=_backend_options,
            ),
            Flag("--standalone", SWITCH, "One node, with a free port and a new id as its rendezvous", default=False),
            Flag("--local-addr", str, "Address of this node for the other nodes (default: detected)", "ADDRESS"),
        ),
    ),
    FlagGroup(
        "workers",
        "--nproc-per-node=gpu -m package.train --epochs=3",
        (
            Flag(
                "--nproc-per-node",
                str,
                "Workers on this node: a number, cpu, gpu, xpu or auto",
                "N",
                default="1",
                complete=("auto", "cpu", "gpu", "xpu"),
            ),
            Flag("--role", str, "Role of this node's workers", "NAME", default="default"),
            Flag("--module", SWITCH, "Run the script as a module, as python -m does", default=False, short="-m"),
            Flag("--no-python", SWITCH, "Run the script as a program, without Python before it", default=False),
            Flag(
                "--run-path",
                SWITCH,
                "Run the script as runpy.run_path does, in a worker of --start-method",
                default=False,
            ),
            Flag(
                "--start-method",
                str,
                "Start of function workers (--run-path): spawn, fork, forkserver",
                "METHOD",
                default="spawn",
                choices=("spawn", "fork", "forkserver"),
            ),
            Flag("--virtual-local-rank", SWITCH, "Each worker sees local rank 0 and one GPU", default=False),
            Flag(
                "--numa-binding",
                str,
                "Bind workers near their GPU by: node, socket, exclusive or core-complex",
                "MODE",
                choices=("node", "socket", "exclusive", "core-complex"),
                from_environment=False,
            ),
        ),
    ),
    FlagGroup(
        "restarts and signals",
        "--max-restarts=3 --signals-to-handle=SIGTERM,SIGUSR1 --shutdown-timeout=60 train.py",
        (
            Flag(
                "--max-restarts",
                whole_number,
                "Worker failures that the job survives, on all nodes together",
                "N",
                default=0,
            ),
            Flag(
                "--monitor-interval",
                number,
                "Seconds between safety checks; values below 60 count as 60",
                "SECONDS",
                default=0.1,
            ),
            Flag(
                "--signals-to-handle",
                str,
                "Signals that stop the workers of this node and end its part of the job",
                "NAMES",
                default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
                complete=signal_names,
            ),
            Flag(
                "--shutdown-timeout",
                whole_number,
                "Grace period before SIGKILL (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30)",
                "SECONDS",
            ),
        ),
    ),
    options.PREEMPTION,
    options.HANGS,
    FlagGroup(
        "logs",
        "--log-dir=logs --tee=3 --local-ranks-filter=0 train.py",
        (
            Flag("--log-dir", str, "Parent of this run's log folder (default: a temporary folder)", "DIR"),
            Flag(
                "--redirects",
                str,
                "To files only: 1 stdout, 2 stderr, 3 both; by local rank: 0:3,1:2",
                "STREAMS",
                default="0",
                short="-r",
                complete=("0", "1", "2", "3"),
            ),
            Flag(
                "--tee",
                str,
                "To files and the console; values as for --redirects",
                "STREAMS",
                default="0",
                short="-t",
                complete=("0", "1", "2", "3"),
            ),
            Flag(
                "--log-line-prefix-template",
                str,
                "Prefix of teed lines, of ${role_name}, ${rank}, ${local_rank}, ${hostname} and text",
                "TEMPLATE",
                default="",
            ),
            Flag(
                "--local-ranks-filter", str, "Local ranks shown on the console: 0,2 (default: all)", "RANKS", default=""
            ),
            Flag(
                "--duplicate-stdout-filters",
                split_filters,
                "Teed lines with one of these texts also go to a file (a comma in a text: ,,)",
                "TEXTS",
                default=(),
            ),
            Flag(
                "--duplicate-stderr-filters",
                split_filters,
                "As for stdout, for stderr",
                "TEXTS",
                default=(),
            ),
            Flag(
                "--logs-specs",
                str,
                "Log layout: default, or a plug-in",
                "NAME",
                from_environment=False,
                complete=_log_layouts,
            ),
            Flag(
                "--event-log-handler",
                str,
                "Where events go: null, console, jsonl:PATH, or a plug-in",
                "NAME",
                default="null",
                complete=("null", "console", "jsonl:"),
            ),
        ),
    ),
    FlagGroup(
        "static ranks",
        "--nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29500 train.py",
        (
            Flag("--node-rank", whole_number, "This node's rank; a preference with other backends", "RANK", default=0),
            Flag(
                "--master-addr",
                str,
                "Address of node 0, where there is no --rdzv-endpoint",
                "ADDRESS",
                default="127.0.0.1",
            ),
            Flag("--master-port", whole_number, "Port of node 0 (default: 29500)", "PORT"),
        ),
    ),
    options.CLUSTERS,
    options.CHECKS,
    options.OTHERS,
)
"""The flags, in the order of the help page."""

BEYOND_TORCHRUN = frozenset(flag.dest for group in GROUPS if group.beyond_torchrun for flag in group.flags)
"""The values that torchrun does not know."""

FLAGS = tuple(flag for group in GROUPS for flag in group.flags)
