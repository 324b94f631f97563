"""Every flag of the command line (contract section 1.1): torchrun's, and those in `agent.options`, in one order.

A flag's name appears only here and where the flag is used. Its row also defines the field of `cli.parse.Options`, its
type and default, the parser, `PET_*` variable, help, reference, manual page and completion.
"""

from __future__ import annotations

from rallypoint.agent.options import (
    CheckOptions,
    CommandOptions,
    Features,
    FrameworkOptions,
    HangOptions,
    OutputOptions,
    PreemptionOptions,
    RecoveryOptions,
    ToolOptions,
    TopologyOptions,
)
from rallypoint.base.flags import (
    SWITCH,
    Flag,
    OptionRecord,
    number,
    restarts,
    signal_names,
    split_filters,
    whole_number,
)
from rallypoint.base.light_typing import Any, NamedTuple


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


class RendezvousOptions(OptionRecord):
    """Which nodes take part, and where they meet."""

    nnodes = Flag(str, "Number of nodes: N, or MIN:MAX for an elastic job", metavar="N", default="1:1")
    rdzv_backend = Flag(
        str,
        "Rendezvous backend: static, c10d (file-based with --rdzv-conf=store_type=file), etcd, etcd-v2, or a plug-in",
        metavar="NAME",
        default="static",
        complete=_backends,
    )
    rdzv_endpoint = Flag(
        str,
        "Address where nodes meet (default port: 29400; etcd: 2379, or a list); with store_type=file, a path",
        metavar="HOST:PORT",
        default="",
    )
    rdzv_id = Flag(str, "Job id, the same on all nodes", metavar="ID", default="none")
    rdzv_conf = Flag(
        str,
        "Backend options, such as join_timeout=600,is_host=true",
        metavar="KEY=VALUE,...",
        default="",
        complete=_backend_options,
    )
    standalone = Flag(SWITCH, "Run a job on this node only, with a free port and a new id", default=False)
    local_addr = Flag(
        str, "Address at which other nodes reach this one (default: detected)", metavar="ADDRESS", default=None
    )


class WorkerOptions(OptionRecord):
    """What runs on this node."""

    nproc_per_node = Flag(
        str,
        "Number of workers on this node: N, cpu, gpu, xpu or auto",
        metavar="N",
        default="1",
        complete=("auto", "cpu", "gpu", "xpu"),
    )
    role = Flag(str, "Role of this node's workers", metavar="NAME", default="default")
    module = Flag(SWITCH, "Run the script as a module, like python -m", default=False, short="-m")
    no_python = Flag(SWITCH, "Run the script directly, without Python", default=False)
    run_path = Flag(
        SWITCH, "Run the script with runpy.run_path, in workers started as --start-method says", default=False
    )
    start_method = Flag(
        str,
        "How to start workers with --run-path: spawn, fork or forkserver",
        metavar="METHOD",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
    )
    virtual_local_rank = Flag(SWITCH, "Give each worker local rank 0 and make one GPU visible to it", default=False)
    numa_binding = Flag(
        str,
        "Bind workers to processors near their GPU: node, socket, exclusive or core-complex",
        metavar="MODE",
        default=None,
        choices=("node", "socket", "exclusive", "core-complex"),
        from_environment=False,
    )


class RestartOptions(OptionRecord):
    """How long the job continues, and what stops it."""

    max_restarts = Flag(
        restarts,
        "Maximum number of restarts after worker failures, for the whole job; 3/1h: 3 in any hour",
        metavar="N",
        default=0,
    )
    monitor_interval = Flag(
        number, "Seconds between fallback checks of the workers, at least 60", metavar="SECONDS", default=0.1
    )
    signals_to_handle = Flag(
        str,
        "Signals that stop this node's workers and end its part of the job",
        metavar="NAMES",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        complete=signal_names,
    )
    shutdown_timeout = Flag(
        whole_number,
        "Grace period before SIGKILL, except after a failure (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30)",
        metavar="SECONDS",
        default=None,
    )


class LogOptions(OptionRecord):
    """Where output and events go."""

    log_dir = Flag(
        str,
        "Parent folder for the log folder of this run (default: a temporary folder)",
        metavar="DIR",
        default=None,
    )
    redirects = Flag(
        str,
        "Write output only to files: 1 stdout, 2 stderr, 3 both; per local rank: 0:3,1:2",
        metavar="STREAMS",
        default="0",
        short="-r",
        complete=("0", "1", "2", "3"),
    )
    tee = Flag(
        str,
        "Write output to files and the console; values as for --redirects",
        metavar="STREAMS",
        default="0",
        short="-t",
        complete=("0", "1", "2", "3"),
    )
    log_line_prefix_template = Flag(
        str,
        "Prefix of teed lines; ${role_name}, ${rank}, ${local_rank} and ${hostname} are replaced",
        metavar="TEMPLATE",
        default="",
    )
    local_ranks_filter = Flag(
        str, "Local ranks to show on the console, such as 0,2 (default: all)", metavar="RANKS", default=""
    )
    duplicate_stdout_filters: Flag[tuple[str, ...]] = Flag(
        split_filters,
        "Also write teed lines that contain one of these texts to a file (,, stands for a comma)",
        metavar="TEXTS",
        default=(),
    )
    duplicate_stderr_filters: Flag[tuple[str, ...]] = Flag(
        split_filters, "Like --duplicate-stdout-filters, for stderr", metavar="TEXTS", default=()
    )
    logs_specs = Flag(
        str,
        "Log layout: default, or a plug-in",
        metavar="NAME",
        default=None,
        from_environment=False,
        complete=_log_layouts,
    )
    event_log_handler = Flag(
        str,
        "Where to send events: null, console, jsonl:PATH, or a plug-in",
        metavar="NAME",
        default="null",
        complete=("null", "console", "jsonl:"),
    )


class StaticRankOptions(OptionRecord):
    """The node's place if ranks are assigned manually."""

    node_rank = Flag(
        whole_number, "Rank of this node; only a preference unless the backend is static", metavar="RANK", default=0
    )
    master_addr = Flag(str, "Address of node 0, if --rdzv-endpoint is not set", metavar="ADDRESS", default="127.0.0.1")
    master_port = Flag(whole_number, "Port of node 0 (default: 29500)", metavar="PORT", default=None)


class FlagGroup(NamedTuple):
    """A section of the help page, with an example for its flags."""

    title: str
    example: str
    flags: tuple[Flag[Any], ...]


GROUPS = (
    FlagGroup(
        "nodes and rendezvous",
        "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job1 train.py",
        RendezvousOptions.flags,
    ),
    FlagGroup("workers", "--nproc-per-node=gpu -m package.train --epochs=3", WorkerOptions.flags),
    FlagGroup(
        "restarts and signals",
        "--max-restarts=3 --signals-to-handle=SIGTERM,SIGUSR1 --shutdown-timeout=60 train.py",
        RestartOptions.flags,
    ),
    FlagGroup(
        "preemption",
        "--preempt-signals=SIGUSR2 --stop-before-end=120 --requeue=10 train.py",
        PreemptionOptions.flags,
    ),
    FlagGroup("hangs", "--hang-timeout=600 --on-hang=report --flight-recorder train.py", HangOptions.flags),
    FlagGroup("logs", "--log-dir=logs --tee=3 --local-ranks-filter=0 train.py", LogOptions.flags),
    FlagGroup(
        "static ranks",
        "--nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29500 train.py",
        StaticRankOptions.flags,
    ),
    FlagGroup(
        "clusters and frameworks",
        "--cluster=auto --worker-env=jax --socket-ifname=auto train.py",
        (CommandOptions.cluster, *FrameworkOptions.flags, *TopologyOptions.flags),
    ),
    FlagGroup(
        "preflight checks",
        "--preflight=require --node-check=./check-gpus.sh train.py",
        CheckOptions.flags,
    ),
    FlagGroup(
        "beyond torchrun",
        "--preload=torch,numpy --store-peers=members,10.0.0.0/8 --host-prefix=always train.py",
        (
            *RecoveryOptions.flags,
            CommandOptions.store_peers,
            CommandOptions.exit_codes,
            *OutputOptions.flags,
            *ToolOptions.flags,
            CommandOptions.host_prefix,
            CommandOptions.log_format,
            CommandOptions.config,
            CommandOptions.dry_run,
        ),
    ),
)
"""The flags, in the order of the help page."""

BEYOND_TORCHRUN = frozenset(Features().flat())
"""The options that torchrun lacks."""

FLAGS = tuple(flag for group in GROUPS for flag in group.flags)
