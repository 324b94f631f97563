"""Every flag of the command line, as one table (contract section 1.1).

The parser, the reading of `PET_*` variables and the help page all come from here.
"""

from __future__ import annotations

from rallypoint.cli.flag_types import (
    SWITCH,
    Flag,
    FlagGroup,
    OneOf,
    duration,
    module_names,
    number,
    seconds,
    shell_command,
    socket_ifname,
    split_filters,
    store_peers,
    timeout,
    whole_number,
    worker_env,
)

GROUPS = (
    FlagGroup(
        "nodes and rendezvous",
        "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job1 train.py",
        (
            Flag("--nnodes", str, "1:1", "Number of nodes: N, or MIN:MAX for an elastic job", "N"),
            Flag(
                "--rdzv-backend",
                str,
                "static",
                "Rendezvous backend: static, c10d (a file with --rdzv-conf=store_type=file), etcd, etcd-v2, a plug-in",
                "NAME",
            ),
            Flag(
                "--rdzv-endpoint",
                str,
                "",
                "Rendezvous address; default port 29400 (c10d) or 2379 (etcd, or a list); a path with store_type=file",
                "HOST:PORT",
            ),
            Flag("--rdzv-id", str, "none", "The job's id, the same on all its nodes", "ID"),
            Flag(
                "--rdzv-conf", str, "", "Options of the backend, such as join_timeout=600,is_host=true", "KEY=VALUE,..."
            ),
            Flag("--standalone", SWITCH, False, "One node, with a free port and a new id as its rendezvous"),
            Flag("--local-addr", str, None, "Address of this node for the other nodes (default: detected)", "ADDRESS"),
        ),
    ),
    FlagGroup(
        "workers",
        "--nproc-per-node=gpu -m package.train --epochs=3",
        (
            Flag("--nproc-per-node", str, "1", "Workers on this node: a number, cpu, gpu, xpu or auto", "N"),
            Flag("--role", str, "default", "Role of this node's workers", "NAME"),
            Flag("--module", SWITCH, False, "Run the script as a module, as python -m does", short="-m"),
            Flag("--no-python", SWITCH, False, "Run the script as a program, without Python before it"),
            Flag("--run-path", SWITCH, False, "Run the script as runpy.run_path does, in a worker of --start-method"),
            Flag(
                "--start-method",
                str,
                "spawn",
                "Start of function workers (--run-path): spawn, fork, forkserver",
                "METHOD",
                choices=("spawn", "fork", "forkserver"),
            ),
            Flag("--virtual-local-rank", SWITCH, False, "Each worker sees local rank 0 and one GPU"),
            Flag(
                "--numa-binding",
                str,
                None,
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
                "--max-restarts", whole_number, 0, "Worker failures that the job survives, on all nodes together", "N"
            ),
            Flag(
                "--monitor-interval",
                number,
                0.1,
                "Seconds between safety checks, 60 at least",
                "SECONDS",
            ),
            Flag(
                "--signals-to-handle",
                str,
                "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
                "Signals that stop the workers of this node and end its part of the job",
                "NAMES",
            ),
            Flag(
                "--shutdown-timeout",
                whole_number,
                None,
                "Grace period before SIGKILL (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30)",
                "SECONDS",
            ),
        ),
    ),
    FlagGroup(
        "preemption",
        "--preempt-signals=SIGUSR2 --stop-before-end=120 --requeue=10 train.py",
        (
            Flag(
                "--preempt-signals",
                str,
                "",
                "Signals to one node after which all workers of the job save, and the job ends with exit code 143",
                "NAMES",
            ),
            Flag(
                "--stop-before-end",
                number,
                0.0,
                "The same, this many seconds before Slurm ends the job; 0 for never",
                "SECONDS",
            ),
            Flag("--requeue", whole_number, 0, "Then have Slurm requeue the job, at most N times", "N"),
        ),
        beyond_torchrun=True,
    ),
    FlagGroup(
        "hangs",
        "--hang-timeout=600 --on-hang=report --flight-recorder train.py",
        (
            Flag(
                "--hang-timeout",
                timeout,
                0.0,
                "Time without output or progress of any rank of the job after which it counts as hung; 0 for never",
                "SECONDS",
            ),
            Flag(
                "--on-hang",
                OneOf("report", "restart", "fail"),
                "report",
                "Action on a hang: report (recommended to start with), restart or fail (exit code 124)",
                "WHAT",
            ),
            Flag("--flight-recorder", SWITCH, False, "Record collectives for torchfrtrace, and dump them on a hang"),
        ),
        beyond_torchrun=True,
    ),
    FlagGroup(
        "logs",
        "--log-dir=logs --tee=3 --local-ranks-filter=0 train.py",
        (
            Flag("--log-dir", str, None, "Parent of this run's log folder (default: a temporary folder)", "DIR"),
            Flag(
                "--redirects",
                str,
                "0",
                "To files only: 1 stdout, 2 stderr, 3 both; by local rank: 0:3,1:2",
                "STREAMS",
                short="-r",
            ),
            Flag("--tee", str, "0", "To files and the console; values as for --redirects", "STREAMS", short="-t"),
            Flag("--local-ranks-filter", str, "", "Local ranks shown on the console: 0,2 (default: all)", "RANKS"),
            Flag(
                "--duplicate-stdout-filters",
                split_filters,
                (),
                "Teed lines with one of these texts also go to a file (a comma in a text: ,,)",
                "TEXTS",
            ),
            Flag("--duplicate-stderr-filters", split_filters, (), "The same for stderr", "TEXTS"),
            Flag("--logs-specs", str, None, "Log layout: default, or a plug-in", "NAME", from_environment=False),
            Flag(
                "--event-log-handler", str, "null", "Where events go: null, console, jsonl:PATH, or a plug-in", "NAME"
            ),
        ),
    ),
    FlagGroup(
        "static ranks",
        "--nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29500 train.py",
        (
            Flag("--node-rank", whole_number, 0, "This node's rank; a preference with other backends", "RANK"),
            Flag("--master-addr", str, "127.0.0.1", "Address of node 0, where there is no --rdzv-endpoint", "ADDRESS"),
            Flag("--master-port", whole_number, None, "Port of node 0 (default: 29500)", "PORT"),
        ),
    ),
    FlagGroup(
        "clusters and frameworks",
        "--cluster=auto --worker-env=jax --socket-ifname=auto train.py",
        (
            Flag(
                "--cluster",
                OneOf("auto", "slurm", "mpi", "k8s", "none"),
                "none",
                "Fill in what was not given from Slurm, mpirun or an Indexed Job: auto, slurm, mpi, k8s, none",
                "WHICH",
            ),
            Flag(
                "--worker-env",
                worker_env,
                (),
                "Variables that workers get beside torch's: jax (for jax.distributed.initialize()), tf, ompi",
                "KIND,...",
            ),
            Flag(
                "--socket-ifname",
                socket_ifname,
                "",
                "Network interface of gloo and NCCL: auto (the one towards the other nodes), or names",
                "NAME,...",
            ),
        ),
        beyond_torchrun=True,
    ),
    FlagGroup(
        "checks before the start",
        "--preflight=require --node-check=./check-gpus.sh train.py",
        (
            Flag(
                "--preflight",
                OneOf("", "warn", "require"),
                "",
                "Check this node (rallyctl check) and its connections to the others: warn, or require (a FAIL ends it)",
                "WHAT",
            ),
            Flag(
                "--node-check",
                shell_command,
                "",
                "Shell command that must succeed before this node joins, and after a failure of its own",
                "COMMAND",
            ),
            Flag("--node-check-timeout", duration, 300.0, "Time in which it must succeed", "SECONDS"),
        ),
        beyond_torchrun=True,
    ),
    FlagGroup(
        "beyond torchrun",
        "--preload=torch,numpy --store-peers=members,10.0.0.0/8 --host-prefix=always train.py",
        (
            Flag(
                "--preload",
                module_names,
                (),
                "Modules imported once on this node, from where restarted workers are forked; auto: the script's",
                "MODULES",
            ),
            Flag(
                "--inprocess-timeout",
                duration,
                10.0,
                "Time for a worker of rallypoint.inprocess to leave a round that has ended, before it is killed",
                "SECONDS",
            ),
            Flag(
                "--fence",
                SWITCH,
                False,
                "Kill the workers of a node that has not heard from the control plane for the lease",
            ),
            Flag(
                "--progress-file",
                str,
                "",
                "File that workers write when they have saved: an integer (Megatron's), or anything",
                "PATH",
            ),
            Flag(
                "--store-peers",
                store_peers,
                "",
                "Peers of the worker store: members, any, or networks (default: members if known)",
                "PEERS",
            ),
            Flag(
                "--exit-codes",
                OneOf("torchrun", "classified"),
                "torchrun",
                "Exit codes: torchrun's, or classified for schedulers: 1, 2, 75 (try again), 93 (do not), 124, 143",
                "WHICH",
            ),
            Flag("--incident-dir", str, "", "Folder where each node writes details of a failure", "DIR"),
            Flag(
                "--tee-collapse",
                seconds,
                0.0,
                "Equal teed lines of several ranks that come within this time are shown once, as [0-7]",
                "SECONDS",
            ),
            Flag(
                "--host-prefix",
                OneOf("auto", "always", "never"),
                "auto",
                "Host name before each line: always, never, or auto, under srun",
                "WHEN",
            ),
        ),
        beyond_torchrun=True,
    ),
)
"""The flags, in the order of the help page."""

BEYOND_TORCHRUN = frozenset(flag.dest for group in GROUPS if group.beyond_torchrun for flag in group.flags)
"""The values that torchrun does not know."""

FLAGS = tuple(flag for group in GROUPS for flag in group.flags)
