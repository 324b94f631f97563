"""The configuration of a launch: the fields and defaults of torch's launcher (contract section 8), then ours."""

from __future__ import annotations

import os
from contextvars import ContextVar

from rallypoint.agent.options import Features
from rallypoint.base.errors import UserError
from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.workers.logs.specs import LogsSpecs

log = get_logger(__name__)

DEFAULT_SHUTDOWN_TIMEOUT = 30
"""Seconds that workers have between the forwarded signal and SIGKILL, by default."""

DEFAULT_RDZV_TIMEOUT = 900
"""Seconds in `rdzv_configs["timeout"]`, by default."""

_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass
class LaunchConfig:
    """How many workers run where, which rendezvous they use, and how their output and failures are handled.

    Args:
        min_nodes: the number of nodes that a round needs at least.
        max_nodes: the number of nodes that a round takes at most.
        nproc_per_node: workers on this node.
        logs_specs: where output goes; None is `DefaultLogsSpecs()`.
        run_id: the job's id; empty lets the launcher make one up.
        role: the role of this node's workers.
        rdzv_endpoint: where the control plane is, in the backend's own form.
        rdzv_backend: the rendezvous backend's name.
        rdzv_configs: the backend's own options (contract section 4.2).
        rdzv_timeout: seconds that replace `rdzv_configs["timeout"]`; -1 leaves it.
        max_restarts: how many failures the job survives.
        monitor_interval: seconds between checks of workers whose exits cannot wake the agent. The others are checked
            once a minute, or once an interval if that is longer.
        start_method: how workers that are functions are started: `spawn`, `fork` or `forkserver`.
        log_line_prefix_template: what stands before each teed line (contract section 6.5).
        metrics_cfg: accepted for torch's callers; unused, as there.
        local_addr: the address under which other nodes reach this one; None to detect it.
        event_log_handler: the name of the handler that events go to.
        numa_options: how workers are bound to processors; None for no binding.
        signals_to_handle: comma-separated names of the signals that the agent passes on to its workers.
        duplicate_stdout_filters: texts; lines of teed standard output that contain one are also written to one file.
        duplicate_stderr_filters: the same for standard error.
        virtual_local_rank: every worker sees local rank 0 and one GPU.
        shutdown_timeout: seconds between the signal to stop and SIGKILL; None for the value of
            `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, or 30.
        endpoint_flag: the flag or variable by which the user gave the endpoint, for messages. Beyond torch.
        endpoint_given: whether the user gave the endpoint, or it is the default. Beyond torch.
        node_rank: the group rank that this node would like where the rendezvous assigns ranks. Beyond torch.
        features: the options beyond torchrun: `Features.of(preload=("torch",), hang_timeout=600.0)`. Beyond torch.

    Raises:
        UserError: a negative or unreadable shutdown timeout, or grace period in `RALLYPOINT_TERMINATION_GRACE`.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    node_rank: int | None = None
    endpoint_flag: str = "--rdzv-endpoint"
    endpoint_given: bool = True
    features: Features = Features()

    shutdown_timeout_given: bool = field(init=False, default=True)
    """Whether `shutdown_timeout` was chosen by the user."""

    def __post_init__(self) -> None:
        self.shutdown_timeout_given = self.shutdown_timeout is not None or _SHUTDOWN_VARIABLE in os.environ
        if os.environ.get("RALLYPOINT_TERMINATION_GRACE"):
            from rallypoint.agent.signals import stated_grace_period

            stated_grace_period(os.environ)  # so that it is refused here and not when it is needed
        self.rdzv_configs = self.rdzv_configs | self._timeout()
        self.shutdown_timeout = _shutdown_timeout(self.shutdown_timeout)
        if self.logs_specs is None:
            from rallypoint.workers.logs.specs import DefaultLogsSpecs

            self.logs_specs = DefaultLogsSpecs()

    def _timeout(self) -> dict[str, Any]:
        if self.rdzv_timeout != -1:
            return {"timeout": self.rdzv_timeout}
        return {} if "timeout" in self.rdzv_configs else {"timeout": DEFAULT_RDZV_TIMEOUT}


def _shutdown_timeout(given: int | None) -> int:
    if given is not None:
        if given < 0:
            raise UserError(f"shutdown_timeout={given} is negative; give seconds from 0 on")
        return given
    text = os.environ.get(_SHUTDOWN_VARIABLE)
    if text is None:
        return DEFAULT_SHUTDOWN_TIMEOUT
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UserError(
            f"{_SHUTDOWN_VARIABLE}={text!r} is not a whole number of seconds from 0 on; set one, or unset it"
        )
    return seconds


IN_PLACE_OF = ContextVar("in_place_of", default="")
"""What the program has started, if that was torch's own launcher (`rallyctl shim`)."""


def announce(in_place_of: str) -> None:
    """Log, and note for this context, that a launch is ours though the program has started something else."""
    from rallypoint.base.version import __version__

    IN_PLACE_OF.set(in_place_of)
    text = "Rallypoint %s launches this in place of %s (rallyctl shim; RALLYPOINT_SHIM=0 leaves it to torch's own)"
    log.info(text, __version__, in_place_of)


def describe(config: LaunchConfig, entrypoint: str) -> str:
    """The text that `LOGLEVEL=INFO` shows when a job is launched (contract section 5.8): aligned `name : value` lines.

    Args:
        config: what is launched.
        entrypoint: a readable name of the program or function.
    """
    log_dir = config.logs_specs.root_log_dir if config.logs_specs else None
    options = {name: "..." if name == "password" else value for name, value in config.rdzv_configs.items()}
    rows: dict[str, object] = {"entrypoint": entrypoint, "log_dir": log_dir, "rdzv_configs": options}
    shown = {name: rows[name] if name in rows else getattr(config, name) for name in _DESCRIPTION_FIELDS}
    width = max(map(len, shown))
    return "\n".join(f"  {name:<{width}} : {value}" for name, value in shown.items())


_DESCRIPTION_FIELDS = (
    "entrypoint",
    "min_nodes",
    "max_nodes",
    "nproc_per_node",
    "run_id",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_configs",
    "max_restarts",
    "monitor_interval",
    "log_dir",
    "metrics_cfg",
    "event_log_handler",
    "numa_options",
    "signals_to_handle",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
)
