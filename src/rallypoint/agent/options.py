"""The options beyond torchrun: one record per feature; its fields are the rows of flags.

Laws:

1. An option is named once here, and where it is used. Its row determines its type, default, parser, `PET_*` variable,
   help, reference, manual page, completion, and the tests of good and bad values. `cli.flags` sorts the rows.
2. `Features` is passed on whole and unchanged: from the command line to `LaunchConfig`, then to `WorkerSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.flags import (
    SWITCH,
    Flag,
    OneOf,
    OptionRecord,
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
"""Signals that cannot be handled, or that the kernel itself sends."""

_CLUSTERS = "auto, slurm, mpi, k8s, pbs, lsf, flux, skypilot, dstack, sagemaker, azureml, volcano, none"

FRAMEWORKS = ("jax", "tf", "ompi", "inherit")
"""Kinds of variables besides torch's, in the order in which they are added."""


def peer_policy(text: str) -> str:
    """`members`, `any`, or networks, separated by commas."""
    from rallypoint.control.coordinator.store_peers import parse_policy

    parse_policy(text)
    return text


def framework_kinds(text: str) -> tuple[str, ...]:
    """Names of frameworks, separated by commas. Torch's alone gives none."""
    try:
        return checked_frameworks([part.strip() for part in text.split(",")])
    except UserError as error:
        raise UsageError(f"{text!r} is not a valid list of frameworks: {error}") from None


def checked_frameworks(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds with these names, each once, without torch's.

    Raises:
        UserError: a kind is unknown.
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
                f"{name!r}{where} is not a network interface on this machine; use auto, or one or more of {known}"
            )
    return text


class PreemptionOptions(OptionRecord):
    """What ends the whole job after its workers save, and whether the job is started again."""

    preempt_signals = Flag(
        str,
        "Signals that, sent to any node, make all workers save and end the job with exit code 143",
        metavar="NAMES",
        default="",
        bad=("USR2", "12", "SIGUSR2,SIGX", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGTERM"),
        complete=signal_names,
    )
    stop_before_end = Flag(
        number,
        "Preempt the job this long before the scheduler ends it; 0: never",
        metavar="SECONDS",
        default=0.0,
        bad=("-1", "nan", "inf", "soon"),
    )
    requeue = Flag(
        count,
        "Let Slurm requeue the job after a preemption, at most N times",
        metavar="N",
        default=0,
        bad=("-1", "often", "3"),
    )

    @property
    def wanted(self) -> bool:
        """Whether anything can preempt the job."""
        return bool(self.preempt_signals or self.stop_before_end)

    @property
    def signals(self) -> frozenset[int]:
        """Numbers of the signals. Raises UsageError if one cannot be used as a request."""
        from rallypoint.base.signals import signal_number

        numbers: set[int] = set()
        for name in filter(None, map(str.strip, self.preempt_signals.split(","))):
            number = signal_number(name)
            if number is None or not name.startswith("SIG"):
                raise UsageError(f"{name!r} is not a signal on this system; use one such as SIGUSR2")
            if number.name in _NO_REQUESTS:
                raise UsageError(f"{name} cannot be used to preempt a job; choose another signal, such as SIGUSR2")
            numbers.add(number)
        return frozenset(numbers)

    @property
    def ignored(self) -> frozenset[int]:
        """Signals that workers ignore until they have handlers; SIGTERM still stops them."""
        from signal import SIGTERM

        return self.signals - {SIGTERM}


class HangOptions(OptionRecord):
    """When a job counts as hung, and what to do then."""

    hang_timeout = Flag(
        timeout,
        "Treat the job as hung after this long without output or progress from any rank; 0: never",
        metavar="SECONDS",
        default=0.0,
        bad=("-1", "nan", "86401", "x"),
    )
    silence_timeout = Flag(
        timeout,
        "Without --hang-timeout: log what the ranks are doing after this long without a sign of life; 0: never",
        metavar="SECONDS",
        default=60.0,
        bad=("-1", "nan", "86401", "x"),
    )
    on_hang = Flag(
        OneOf("report", "restart", "fail"),
        "Reaction to a hang: report (start with this), restart, or fail (exit code 124)",
        metavar="WHAT",
        default="report",
        bad=("", "kill", "Report"),
    )
    flight_recorder = Flag(
        SWITCH, "Record collectives for torchfrtrace and dump them on a hang", default=False, bad=("1",)
    )

    @property
    def reaction(self) -> str:
        """What this node does if the job hangs: without a timeout of its own it only reports."""
        return self.on_hang if self.hang_timeout else "report"


class CheckOptions(OptionRecord):
    """Checks before a node joins."""

    preflight = Flag(
        OneOf("", "warn", "require"),
        "Check this node (like rallyctl check) and its connections: warn, or require (do not join after a FAIL)",
        metavar="WHAT",
        default="",
        bad=("maybe",),
    )
    node_check = Flag(
        shell_command,
        "Shell command that must succeed before this node joins, and again after each failure on this node",
        metavar="COMMAND",
        default="",
        bad=(" ",),
    )
    node_check_timeout = Flag(
        duration,
        "Time limit for --node-check",
        metavar="SECONDS",
        default=300.0,
        bad=("0", "-1", "nan", "inf", "86401", "soon"),
    )


class FrameworkOptions(OptionRecord):
    """Variables and interfaces that workers get besides torch's variables."""

    worker_env: Flag[tuple[str, ...]] = Flag(
        framework_kinds,
        "Additional variables for workers: jax (for jax.distributed.initialize()), tf, ompi, inherit",
        metavar="KIND,...",
        default=(),
        samples=("jax,tf", "ompi"),
        bad=("horovod", "", "jax,,tf"),
        complete=FRAMEWORKS,
    )
    socket_ifname = Flag(
        interface_names,
        "Network interfaces for gloo and NCCL: names, or auto (the one that reaches the other nodes)",
        metavar="NAME,...",
        default="",
        samples=("auto", "lo"),
        bad=("eth99", "lo,,lo", "Auto"),
        complete=("auto",),
    )


class RecoveryOptions(OptionRecord):
    """How workers come back after a failure."""

    preload: Flag[tuple[str, ...]] = Flag(
        module_names,
        "Modules to import once per node, in a process that restarted workers are forked from; auto: the script's "
        "imports",
        metavar="MODULES",
        default=(),
        samples=("torch,torch.distributed", "json"),
        bad=("a-b", "torch,", "a,,b", "1a", "a b"),
        complete=("auto",),
    )
    standby = Flag(
        count,
        "Number of standby workers on this node, to replace workers that die (for rallypoint.inprocess)",
        metavar="N",
        default=0,
        bad=("-1", "some"),
    )
    inprocess_timeout = Flag(
        duration,
        "Time limit for a rallypoint.inprocess worker to leave an ended round before it is killed",
        metavar="SECONDS",
        default=10.0,
        bad=("0", "-1", "nan", "inf", "86401", "soon"),
    )
    fence = Flag(
        SWITCH,
        "Kill this node's workers if the control plane is silent for a whole lease",
        default=False,
        bad=("1",),
    )
    gpu_memory_timeout = Flag(
        seconds,
        "Time limit for a restart to wait for ended workers' GPU memory; 0: do not check",
        metavar="SECONDS",
        default=10.0,
        bad=("-1", "nan", "3601", "x"),
    )
    host_failure_limit = Flag(
        count,
        "Number of failures that start on this node before it leaves the job; 0: never",
        metavar="N",
        default=0,
        bad=("-1", "often"),
    )
    leftover_timeout = Flag(
        seconds,
        "Time limit for busy processes that successful workers leave behind; 0: end them at once",
        metavar="SECONDS",
        default=30.0,
        bad=("-1", "nan", "3601", "x"),
    )
    progress_file = Flag(
        str,
        "File that workers write after each save: the step as an integer (like Megatron), or any content",
        metavar="PATH",
        default="",
        bad=("/none/there",),
    )

    @property
    def preloaded(self) -> tuple[str, ...]:
        """Modules to import ahead; with standby workers, at least the script's imports."""
        return self.preload or (("auto",) if self.standby else ())


class OutputOptions(OptionRecord):
    """Output and details for people."""

    incident_dir = Flag(
        str, "Folder in which each node saves details of failures", metavar="DIR", default="", bad=("/dev/null",)
    )
    tee_collapse = Flag(
        seconds,
        "Merge equal teed lines of several ranks, as [0-7], if they arrive within this time",
        metavar="SECONDS",
        default=0.0,
        bad=("-1", "nan", "3601", "x"),
    )


class ToolOptions(OptionRecord):
    """A command that runs the workers."""

    wrap = Flag(
        str,
        "Command to run each worker under, such as py-spy record --; has macros for rank, local rank, host and round",
        metavar="COMMAND",
        default="",
        samples=("nice -n 5", "env"),
        bad=(" ", "env 'a", "env %x", "no-such-program", "env $((1-%r))"),
    )
    wrap_ranks = Flag(
        str,
        "Global ranks to wrap, such as 0,3-5 (default: all)",
        metavar="LIST",
        default="",
        samples=("0,3-5", "1"),
        bad=("a", "3-1", "-1", "0,,1"),
    )


class TopologyOptions(OptionRecord):
    """Which nodes stay together."""

    node_domain = Flag(
        str,
        "Name of this node's domain: nodes with connected GPUs, such as a rack; auto: ask NVML or Slurm",
        metavar="NAME",
        default="",
        samples=("rack-7", "auto"),
        bad=(" ", " rack"),
        complete=("auto",),
    )
    segment = Flag(
        whole_number,
        "Number of nodes per segment (one domain, adjacent group ranks); must divide the minimum of --nnodes",
        metavar="N",
        default=1,
        samples=("1", "1"),
        bad=("-1", "two", "3"),
    )


class CommandOptions(OptionRecord):
    """Options of the command only; they have no effect in a `LaunchConfig`."""

    config = Flag(
        str,
        "TOML file with flags by name, [env] and [rdzv-conf]; overridden by flags and PET_* variables",
        metavar="FILE[:PROFILE]",
        default="",
        samples=("/dev/null", "/dev//null"),
    )
    dry_run = Flag(
        SWITCH,
        "Print the effective configuration with the source of each value and exit",
        default=False,
        bad=("1",),
    )
    cluster = Flag(
        OneOf(*_CLUSTERS.split(", ")),
        f"Fill in missing flags from the cluster's environment: {_CLUSTERS}",
        metavar="WHICH",
        default="none",
        bad=("sge", ""),
    )
    store_peers = Flag(
        peer_policy,
        "Hosts allowed to use the worker store: members, any, or networks (default: members if known)",
        metavar="PEERS",
        default="",
        samples=("members,10.0.0.0/8", "any"),
        bad=("maybe", "10.0.0.0/33"),
        complete=("members", "any"),
    )
    exit_codes = Flag(
        OneOf("torchrun", "classified", "in-place"),
        "Exit codes: torchrun (0, 1, 2), classified (75: retry, 94: do not, ...) or in-place (also 85)",
        metavar="WHICH",
        default="torchrun",
        bad=("mine", ""),
    )
    host_prefix = Flag(
        OneOf("auto", "always", "never"),
        "When to prefix lines with the host name: always, never, or auto (under srun)",
        metavar="WHEN",
        default="auto",
        bad=("maybe", ""),
    )
    log_format = Flag(
        OneOf("auto", "glog"),
        "Format of the launcher's log lines: glog (with file and line), or auto (short on a terminal, else glog)",
        metavar="FORM",
        default="auto",
        bad=("json", ""),
    )


class Features(NamedTuple):
    """All options beyond torchrun; the defaults are torchrun's behaviour."""

    preemption: PreemptionOptions = PreemptionOptions()
    hangs: HangOptions = HangOptions()
    checks: CheckOptions = CheckOptions()
    frameworks: FrameworkOptions = FrameworkOptions()
    recovery: RecoveryOptions = RecoveryOptions()
    output: OutputOptions = OutputOptions()
    topology: TopologyOptions = TopologyOptions()
    tools: ToolOptions = ToolOptions()
    command: CommandOptions = CommandOptions()

    @classmethod
    def of(cls, **options: Any) -> Features:
        """Create a copy with these options, by name: `Features.of(preload=("torch",), hang_timeout=600.0)`.

        Raises:
            TypeError: an option is unknown.
        """
        records = [
            record.replace(**{name: options.pop(name) for name in vars(record) if name in options}) for record in cls()
        ]
        OptionRecord(**options)  # rejects unknown names
        return cls._make(records)

    def flat(self) -> dict[str, Any]:
        """All options by name."""
        return {name: value for record in self for name, value in vars(record).items()}
