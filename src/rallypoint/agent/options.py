"""What can be asked for beyond torchrun: a record of options for each feature, and the flags that set them.

Laws:

1. An option is named twice here, as a field of a record and as the flag in a row, and where it is used; nowhere else.
   The default is the field's. Parser, `PET_*` variables, help, reference, manual page, completion and the tests of good
   and of bad values come from the row.
2. `Features` travels whole and unchanged: from the command line to `LaunchConfig`, and from there to `WorkerSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.flags import (
    SWITCH,
    Flag,
    FlagGroup,
    OneOf,
    count,
    duration,
    module_names,
    number,
    seconds,
    shell_command,
    signal_names,
    timeout,
    whole_number,
)
from rallypoint.base.light_typing import Any, NamedTuple

_NO_REQUESTS = (
    *("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE"),
    *("SIGILL", "SIGTRAP", "SIGSYS", "SIGABRT", "SIGPIPE"),
)
"""Signals that cannot be handled, or that the kernel sends for reasons of its own."""


class PreemptionOptions(NamedTuple):
    """What causes the whole job to end after its workers have saved, and whether it is started again."""

    preempt_signals: str = ""
    """Comma-separated names of signals to one node."""
    stop_before_end: float = 0.0
    """Seconds before the end of the Slurm job; 0 for never."""
    requeue: int = 0
    """How many times Slurm may be asked to start the job again after that."""

    @property
    def wanted(self) -> bool:
        """Whether anything causes it."""
        return bool(self.preempt_signals or self.stop_before_end)

    @property
    def signals(self) -> frozenset[int]:
        """The numbers of the signals. Raises UsageError if one is no signal that can ask for anything."""
        from rallypoint.base.signals import signal_number

        numbers: set[int] = set()
        for name in filter(None, map(str.strip, self.preempt_signals.split(","))):
            number = signal_number(name)
            if number is None or not name.startswith("SIG"):
                raise UsageError(f"{name!r} is not a signal of this system; name one such as SIGUSR2")
            if number.name in _NO_REQUESTS:
                raise UsageError(f"{name} cannot ask a job to save; name another, such as SIGUSR2")
            numbers.add(number)
        return frozenset(numbers)

    @property
    def ignored(self) -> frozenset[int]:
        """The signals that workers ignore until they have handlers; by SIGTERM they are stopped."""
        from signal import SIGTERM

        return self.signals - {SIGTERM}


class HangOptions(NamedTuple):
    """When a job counts as hung, and what is done then."""

    hang_timeout: float = 0.0
    """Seconds without a sign of life from any rank of any node; 0 for never."""
    on_hang: str = "report"
    """`report`, `restart` or `fail`."""
    flight_recorder: bool = False
    """Whether the flight recorders of torch's process groups are on, and asked for a dump when the job hangs."""

    @property
    def reaction(self) -> str:
        """What this node does if the job hangs: without a timeout of its own it only reports."""
        return self.on_hang if self.hang_timeout else "report"


class CheckOptions(NamedTuple):
    """Checks before a node joins."""

    preflight: str = ""
    """`warn` or `require`: after a FAIL the node stays out of the job if that is required; empty for no checks."""
    node_check: str = ""
    """A command for the shell that must succeed before this node joins, and before it joins again after a failure of
    its own workers; empty for none."""
    node_check_timeout: float = 300.0
    """Seconds within which it must succeed."""


class FrameworkOptions(NamedTuple):
    """What workers are told of this node beside torch's variables."""

    worker_env: tuple[str, ...] = ()
    """Frameworks whose variables workers get too: `jax`, `tf`, `ompi`."""
    socket_ifname: str = ""
    """The network interface of gloo and NCCL: `auto`, or comma-separated names; empty for their own choice."""


class RecoveryOptions(NamedTuple):
    """How workers come back after a failure."""

    preload: tuple[str, ...] = ()
    """Modules to import once; workers that are Python scripts are forked from that process if possible. `auto` among
    these stands for what the script imports, for workers that are started again."""
    standby: int = 0
    """How many processes of this node have run everything up to their place in a round, for workers that die."""
    inprocess_timeout: float = 10.0
    """Seconds within which the function of a worker with `rallypoint.inprocess` has to end after a round has ended;
    then the worker is killed and restarted."""
    fence: bool = False
    """Whether the workers of a node that has not heard from the control plane for the lease are killed."""
    gpu_memory_timeout: float = 10.0
    """Seconds that a restart waits for the GPU memory of workers that have ended; 0: do not look."""
    progress_file: str = ""
    """A file that the workers write when they have made progress, an integer or anything else; empty for none."""

    @property
    def preloaded(self) -> tuple[str, ...]:
        """What is imported ahead: with standby workers, in any case what the script imports."""
        return self.preload or (("auto",) if self.standby else ())


class OutputOptions(NamedTuple):
    """What a person gets to see."""

    incident_dir: str = ""
    """A folder in which each node keeps what it knows about a failure; empty for none."""
    tee_collapse: float = 0.0
    """Seconds within which equal teed lines of several ranks are shown once; 0 for never."""


class TopologyOptions(NamedTuple):
    """Which nodes stay together."""

    node_domain: str = ""
    """The machines whose GPUs are well connected with those of this one: a name, `auto`, or empty if not known."""
    segment: int = 1
    """The number of nodes of one domain that have adjacent group ranks."""


class CommandOptions(NamedTuple):
    """What only the command acts on; without effect in a `LaunchConfig`."""

    cluster: str = "none"
    store_peers: str = ""
    exit_codes: str = "torchrun"
    host_prefix: str = "auto"
    log_format: str = "auto"


class Features(NamedTuple):
    """All of these; the default is torchrun's behaviour."""

    preemption: PreemptionOptions = PreemptionOptions()
    hangs: HangOptions = HangOptions()
    checks: CheckOptions = CheckOptions()
    frameworks: FrameworkOptions = FrameworkOptions()
    recovery: RecoveryOptions = RecoveryOptions()
    output: OutputOptions = OutputOptions()
    topology: TopologyOptions = TopologyOptions()
    command: CommandOptions = CommandOptions()

    @classmethod
    def of(cls, **options: Any) -> Features:
        """These with the given options, by their names alone: `Features.of(preload=("torch",), hang_timeout=600.0)`.

        Raises:
            TypeError: there is no such option.
        """
        records = [
            record._replace(**{name: options.pop(name) for name in record._fields if name in options})
            for record in cls()
        ]
        if options:
            raise TypeError(f"there is no option {next(iter(options))!r}")
        return cls._make(records)

    def flat(self) -> dict[str, Any]:
        """The options by their names alone."""
        return {name: value for record in self for name, value in record._asdict().items()}


def store_peers(text: str) -> str:
    """`members`, `any`, or networks, separated by commas."""
    from rallypoint.control.coordinator.store_peers import parse_policy

    parse_policy(text)
    return text


FRAMEWORKS = ("jax", "tf", "ompi")
"""Kinds of variables besides torch's, in the order in which workers get them."""


def framework_kinds(text: str) -> tuple[str, ...]:
    """Kinds, separated by commas. Torch's alone come to none."""
    try:
        return checked_frameworks([part.strip() for part in text.split(",")])
    except UserError as error:
        raise UsageError(f"{text!r} is not a list of kinds: {error}") from None


def checked_frameworks(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds with these names, without torch's, each once.

    Raises:
        UserError: there is no such kind.
    """
    for name in names:
        if name not in FRAMEWORKS and name != "torch":
            raise UserError(f"{name!r} is not one of {', '.join(['torch', *FRAMEWORKS])}")
    return tuple(name for name in FRAMEWORKS if name in names)


def interface_names(text: str) -> str:
    """`auto`, or names, separated by commas."""
    if text in ("", "auto"):
        return text
    import socket

    there = [name for _, name in socket.if_nameindex()]
    for name in text.split(","):
        if name not in there:
            where = f" in {text!r}" if name != text else ""
            known = ", ".join(there)
            raise UsageError(
                f"{name!r}{where} is not a network interface of this machine; give auto, or one or more of {known}"
            )
    return text


def _group(title: str, example: str, *rows: Flag) -> FlagGroup:
    defaults = Features().flat()
    return FlagGroup(title, example, tuple(row._replace(default=defaults[row.dest]) for row in rows), True)


PREEMPTION = _group(
    "preemption",
    "--preempt-signals=SIGUSR2 --stop-before-end=120 --requeue=10 train.py",
    Flag(
        "--preempt-signals",
        str,
        "Signals to one node after which all workers of the job save, and the job ends with exit code 143",
        "NAMES",
        bad=("USR2", "12", "SIGUSR2,SIGX", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGTERM"),
        complete=signal_names,
    ),
    Flag(
        "--stop-before-end",
        number,
        "As on such a signal, this many seconds before Slurm ends the job; 0 for never",
        "SECONDS",
        bad=("-1", "nan", "inf", "soon"),
    ),
    Flag(
        "--requeue",
        count,
        "After that, Slurm requeues the job, at most N times",
        "N",
        bad=("-1", "often", "3"),
    ),
)

HANGS = _group(
    "hangs",
    "--hang-timeout=600 --on-hang=report --flight-recorder train.py",
    Flag(
        "--hang-timeout",
        timeout,
        "Time without output or progress of any rank of the job after which it counts as hung; 0 for never",
        "SECONDS",
        bad=("-1", "nan", "86401", "x"),
    ),
    Flag(
        "--on-hang",
        OneOf("report", "restart", "fail"),
        "Action on a hang: report (recommended to start with), restart or fail (exit code 124)",
        "WHAT",
        bad=("", "kill", "Report"),
    ),
    Flag("--flight-recorder", SWITCH, "Record collectives for torchfrtrace, and dump them on a hang", bad=("1",)),
)

CLUSTERS = _group(
    "clusters and frameworks",
    "--cluster=auto --worker-env=jax --socket-ifname=auto train.py",
    Flag(
        "--cluster",
        OneOf("auto", "slurm", "mpi", "k8s", "none"),
        "Fill in what was not given from Slurm, mpirun or an Indexed Job: auto, slurm, mpi, k8s, none",
        "WHICH",
        bad=("pbs", ""),
    ),
    Flag(
        "--worker-env",
        framework_kinds,
        "Variables that workers get beside torch's: jax (for jax.distributed.initialize()), tf, ompi",
        "KIND,...",
        samples=("jax,tf", "ompi"),
        bad=("horovod", "", "jax,,tf"),
        complete=FRAMEWORKS,
    ),
    Flag(
        "--socket-ifname",
        interface_names,
        "Network interface of gloo and NCCL: auto (the one towards the other nodes), or names",
        "NAME,...",
        samples=("auto", "lo"),
        bad=("eth99", "lo,,lo", "Auto"),
        complete=("auto",),
    ),
    Flag(
        "--node-domain",
        str,
        "Name of the machines whose GPUs are connected with this node's, such as a rack; auto: by NVML or Slurm",
        "NAME",
        samples=("rack-7", "auto"),
        bad=(" ", " rack"),
        complete=("auto",),
    ),
    Flag(
        "--segment",
        whole_number,
        "Number of nodes of one domain that have adjacent group ranks; the minimum of --nnodes is a multiple of it",
        "N",
        samples=("1", "1"),
        bad=("-1", "two", "3"),
    ),
)

CHECKS = _group(
    "checks before the start",
    "--preflight=require --node-check=./check-gpus.sh train.py",
    Flag(
        "--preflight",
        OneOf("", "warn", "require"),
        "Check this node (rallyctl check) and its connections to the others: warn, or require (a FAIL ends it)",
        "WHAT",
        bad=("maybe",),
    ),
    Flag(
        "--node-check",
        shell_command,
        "Shell command that must succeed before this node joins, and after its own failure",
        "COMMAND",
        bad=(" ",),
    ),
    Flag(
        "--node-check-timeout",
        duration,
        "Time in which the node check must succeed",
        "SECONDS",
        bad=("0", "-1", "nan", "inf", "86401", "soon"),
    ),
)

OTHERS = _group(
    "beyond torchrun",
    "--preload=torch,numpy --store-peers=members,10.0.0.0/8 --host-prefix=always train.py",
    Flag(
        "--preload",
        module_names,
        "Modules imported once on this node, from where restarted workers are forked; auto: the script's",
        "MODULES",
        samples=("torch,torch.distributed", "json"),
        bad=("a-b", "torch,", "a,,b", "1a", "a b"),
        complete=("auto",),
    ),
    Flag(
        "--standby",
        count,
        "Standby workers of this node, prepared to take the place of one that dies (rallypoint.inprocess); 0 for none",
        "N",
        bad=("-1", "some"),
    ),
    Flag(
        "--inprocess-timeout",
        duration,
        "Time for a worker of rallypoint.inprocess to leave a round that has ended, before it is killed",
        "SECONDS",
        bad=("0", "-1", "nan", "inf", "86401", "soon"),
    ),
    Flag(
        "--fence",
        SWITCH,
        "Kill the workers of a node that has not heard from the control plane for the lease",
        bad=("1",),
    ),
    Flag(
        "--gpu-memory-timeout",
        seconds,
        "Time that a restart waits for the GPU memory of workers that have ended; 0: do not look",
        "SECONDS",
        bad=("-1", "nan", "3601", "x"),
    ),
    Flag(
        "--progress-file",
        str,
        "File that workers write when they have saved: an integer (as Megatron does) or any content",
        "PATH",
        bad=("/none/there",),
    ),
    Flag(
        "--store-peers",
        store_peers,
        "Peers of the worker store: members, any, or networks (default: members if known)",
        "PEERS",
        samples=("members,10.0.0.0/8", "any"),
        bad=("maybe", "10.0.0.0/33"),
        complete=("members", "any"),
    ),
    Flag(
        "--exit-codes",
        OneOf("torchrun", "classified"),
        "Exit codes: torchrun's, or classified for schedulers: 1, 2, 75 (try again), 93 and 94 (do not), 124, 143",
        "WHICH",
        bad=("mine", ""),
    ),
    Flag("--incident-dir", str, "Folder where each node writes details of a failure", "DIR", bad=("/dev/null",)),
    Flag(
        "--tee-collapse",
        seconds,
        "Equal teed lines of several ranks that come within this time are shown once, as [0-7]",
        "SECONDS",
        bad=("-1", "nan", "3601", "x"),
    ),
    Flag(
        "--host-prefix",
        OneOf("auto", "always", "never"),
        "Host name before each line: always, never, or auto, under srun",
        "WHEN",
        bad=("maybe", ""),
    ),
    Flag(
        "--log-format",
        OneOf("auto", "glog"),
        "Form of our own lines: auto (for people on a terminal, else glog), or glog, with file and line",
        "FORM",
        bad=("json", ""),
    ),
)
