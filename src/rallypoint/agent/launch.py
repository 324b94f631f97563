"""Configures and runs a launch: creates the job's rendezvous, spec and agent (contract section 8)."""

from __future__ import annotations

import sys

if sys.platform != "linux":
    from rallypoint.base.errors import NEEDS_LINUX

    raise ImportError(NEEDS_LINUX)

import errno
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

from rallypoint.agent.feature import admit, served
from rallypoint.agent.loop import run_agent
from rallypoint.agent.options import Features
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.signals import SIGNALS_VARIABLE, GracePeriods, stated_grace_period
from rallypoint.agent.spec import RunResult, WorkerSpec, program_name
from rallypoint.agent.workers import WorkerController
from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, SignalException, UserError
from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.base.secrets import read_job_secret
from rallypoint.base.signals import ignore_signals_at_exit
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import get_rendezvous_handler
from rallypoint.rendezvous.params import RendezvousParameters

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.failures.report import ChildFailedError
    from rallypoint.observe.health import HealthCheckServer, ProgressProbe
    from rallypoint.workers.logs.specs import LogsSpecs

log = get_logger(__name__)

DEFAULT_SHUTDOWN_TIMEOUT = 30
"""Default number of seconds between the signal forwarded to workers and SIGKILL."""

DEFAULT_RDZV_TIMEOUT = 900
"""Default number of seconds in `rdzv_configs["timeout"]`."""

_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass
class LaunchConfig:
    """How many workers to run where, which rendezvous to use, and how to handle output and failures.

    Args:
        min_nodes: the smallest number of nodes in a round.
        max_nodes: the largest number of nodes in a round.
        nproc_per_node: workers on this node.
        logs_specs: where to write output; `DefaultLogsSpecs()` by default.
        run_id: the job's id; if empty, the launcher chooses one.
        role: the role of this node's workers.
        rdzv_endpoint: the address of the control plane, in the backend's own form.
        rdzv_backend: the name of the rendezvous backend.
        rdzv_configs: the backend's own options (contract section 4.2).
        rdzv_timeout: seconds that replace `rdzv_configs["timeout"]`; -1 keeps that.
        max_restarts: how many failures the job can survive.
        monitor_interval: seconds between checks of workers whose exits cannot wake the agent. Other workers are checked
            once per minute, or once per interval if that is longer.
        start_method: how to start workers that are functions: `spawn`, `fork` or `forkserver`.
        log_line_prefix_template: the prefix of each teed line (contract section 6.5).
        metrics_cfg: accepted for compatibility; unused, as in torch.
        local_addr: the address at which other nodes reach this one; detected by default.
        event_log_handler: the name of the handler that receives events.
        numa_options: how to bind workers to processors; no binding by default.
        signals_to_handle: comma-separated names of the signals that the agent passes on to its workers.
        duplicate_stdout_filters: texts; lines of teed standard output that contain any of these are also written to one
            file.
        duplicate_stderr_filters: the same for standard error.
        virtual_local_rank: give every worker local rank 0 and one GPU.
        shutdown_timeout: seconds between the signal to stop and SIGKILL; by default
            `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, or 30.
        endpoint_flag: the flag or variable that set the endpoint, for messages. Beyond torch.
        endpoint_given: whether the user set the endpoint. Beyond torch.
        node_rank: the preferred group rank, if the rendezvous assigns ranks. Beyond torch.
        features: the options beyond torchrun: `Features.of(preload=("torch",), hang_timeout=600.0)`. Beyond torch.

    Raises:
        UserError: the shutdown timeout, or the grace period in `RALLYPOINT_TERMINATION_GRACE`, is negative or not a
            number.
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
    """Whether the user set `shutdown_timeout`."""

    def __post_init__(self) -> None:
        self.shutdown_timeout_given = self.shutdown_timeout is not None or _SHUTDOWN_VARIABLE in os.environ
        if os.environ.get("RALLYPOINT_TERMINATION_GRACE"):
            stated_grace_period(os.environ)  # so that a bad value fails here and not later
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
            raise UserError(f"shutdown_timeout={given} is negative; set it to 0 or more seconds")
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
            f"{_SHUTDOWN_VARIABLE}={text!r} is not a whole number of seconds; set it to 0 or more, or unset it"
        )
    return seconds


IN_PLACE_OF = ContextVar("in_place_of", default="")
"""The other launcher that the program started, if `rallyctl shim` replaced it."""


def announce(in_place_of: str) -> None:
    """Log, and record in this context, that Rallypoint runs a launch for which the program started another launcher."""
    from rallypoint.base.version import __version__

    IN_PLACE_OF.set(in_place_of)
    text = "Rallypoint %s runs instead of %s (rallyctl shim; RALLYPOINT_SHIM=0 restores torch's launcher)"
    log.info(text, __version__, in_place_of)


def describe(config: LaunchConfig, entrypoint: str) -> str:
    """Format the text that `LOGLEVEL=INFO` prints at a launch (contract section 5.8): aligned `name : value` lines.

    Args:
        config: the configuration of the launch.
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


# Launch


class elastic_launch:
    """Launches an entry point with a config: `elastic_launch(config, entrypoint)(*args)`.

    The call runs this node's agent until the job ends. It returns the return values of this node's workers by global
    rank (None for programs).
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job with these arguments for the entry point. Raises the errors of `launch_agent`."""
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run this node's agent until the job ends.

    Args:
        config: the configuration of the launch.
        entrypoint: a program to run (for example the path of an interpreter), or a function to call.
        args: its arguments; for a function they must be picklable, unless the start method is fork.
        health_check_server: see `observe.health.health_check`.

    Returns:
        The return values of this node's workers by global rank; empty for a spare that was not needed.

    Raises:
        UserError: the config cannot work.
        ChildFailedError: workers failed; the error contains the job's first failure.
        PreflightError: this node failed a required check.
        RendezvousError: the nodes did not form a round.
        JobPreempted: the whole job was preempted.
        SignalException: a signal ended this agent. The subclass `NodeLeftInOrder` means that the job continues without
            this node.
    """
    if entrypoint is None:
        from rallypoint.base.errors import user_error

        text = "the entry point is None, so there is nothing to launch; pass a program or a function"
        raise user_error(text, AssertionError)
    if config.event_log_handler != "null":
        from rallypoint.observe.telemetry.handlers import get_logging_handler

        get_logging_handler(config.event_log_handler)  # before anything starts
    run_id = config.run_id or _random_run_id()
    log.info("launching:\n%s", describe(config, program_name(entrypoint, args)))
    os.environ[SIGNALS_VARIABLE] = config.signals_to_handle
    read_job_secret()
    assert config.logs_specs is not None
    parameters = _parameters(config, run_id)
    alone = parameters.max_nodes == 1
    workers: WorkerController | None = None
    ended_by: BaseException | None = None
    neighbors: AbstractContextManager[object] = nullcontext() if alone else register_on_host(parameters, os.environ)
    with ignore_signals_at_exit(), neighbors:
        try:
            admit(config, parameters)
            workers = _workers(config, entrypoint, args, parameters)
            health = _health(workers, config, health_check_server)
            return _run(workers, health, config.role, program_name(entrypoint, args))
        except BaseException as error:
            ended_by = error
            raise
        finally:
            config.logs_specs.clean_up()
            if workers is not None:
                workers.finish(ended_by)
            ended_by = None  # its traceback refers to this frame


def _run(
    workers: WorkerController, health: AbstractContextManager[ProgressProbe | None], role: str, name: str
) -> dict[int, Any]:
    """Run the agent, and record how it ended: if the job failed, so did its agent."""
    try:
        result = run_agent(workers, role, health)
        if result is not None and result.is_failed():
            raise _failure(result, name)
    except Exception as error:
        if workers.events is not None:
            interrupted = isinstance(error, SignalException | JobPreempted)
            outcome = "interrupted" if interrupted else "failed"
            workers.events.agent_ended("left" if isinstance(error, NodeLeftInOrder) else outcome, error)
        raise
    if workers.events is not None:
        workers.events.agent_ended("succeeded")
    return {} if result is None else result.return_values


def _failure(result: RunResult, name: str) -> ChildFailedError:
    from rallypoint.failures.report import ChildFailedError

    return ChildFailedError(
        name,
        result.failures,
        cause=result.cause,
        stopped=result.stopped,
        restarts=result.restarts,
        reported_elsewhere=result.reported_elsewhere,
        ending=result.ending,
    )


def _parameters(config: LaunchConfig, run_id: str) -> RendezvousParameters:
    options = dict(config.rdzv_configs)
    if config.node_rank is not None:
        options["rank"] = config.node_rank
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **options,
    )
    parameters.endpoint_flag = config.endpoint_flag
    parameters.endpoint_given = config.endpoint_given
    return parameters


def _workers(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any], parameters: RendezvousParameters
) -> WorkerController:
    failure_grace = parameters.get_as_seconds("failure_grace", 0.0) if "failure_grace" in parameters.config else None
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=get_rendezvous_handler(parameters),
        entrypoint=entrypoint,
        args=tuple(args),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
        features=config.features,
        in_place_of=IN_PLACE_OF.get(),
    )
    assert config.logs_specs is not None
    assert config.shutdown_timeout is not None
    workers = WorkerController(
        spec,
        rendezvous_of(spec),
        GracePeriods(config.shutdown_timeout, failure_grace, config.shutdown_timeout_given),
        config.logs_specs,
        config.start_method,
        config.log_line_prefix_template,
    )
    workers.is_launched, workers.max_nodes = True, parameters.max_nodes
    return workers


def _health(
    workers: WorkerController, config: LaunchConfig, server: HealthCheckServer | None
) -> AbstractContextManager[ProgressProbe | None]:
    """The health check, for the duration of the run."""
    if server is None and "TORCHELASTIC_HEALTH_CHECK_PORT" not in os.environ:
        return nullcontext()
    from rallypoint.observe.health import health_check

    return health_check(server, lambda: served(workers, config.rdzv_configs))


def _random_run_id() -> str:
    from random import SystemRandom

    run_id = str(SystemRandom().randrange(10**9))
    log.warning("run_id is not set, so this agent uses %s and no other agent can join its job", run_id)
    return run_id


def rendezvous_of(spec: WorkerSpec, exit_barrier_timeout: float = 300) -> RendezvousClient:
    """Create a node's rendezvous client from its spec's handler.

    Args:
        spec: the spec of the node's workers.
        exit_barrier_timeout: seconds to wait for other nodes at the end if the handler cannot notify. With our own
            handler the wait ends with the verdict, however long that takes.
    """
    if isinstance(spec.rdzv_handler, ElasticHandler):
        return spec.rdzv_handler
    from rallypoint.agent.third_party import PollingRendezvousClient

    return PollingRendezvousClient(spec, exit_barrier_timeout)


# Several agents of one job on this machine should share its processors: `OMP_NUM_THREADS`


def register_on_host(parameters: RendezvousParameters, environ: Mapping[str, str]) -> socket.socket:
    """Register with the job's other agents on this machine; warn if this is the second one and threads are not limited.

    While it runs, the first agent owns abstract socket 0, the second owns socket 1, and all others own none. So exactly
    one agent finds that it is the second, and warns for all. The socket's name contains the job, the rendezvous port,
    and the processors that the agent may use, so agents that a scheduler bound to different processors never meet.

    Args:
        parameters: the parameters of the rendezvous.
        environ: the workers' environment.

    Returns:
        The socket, which reserves the agent's place until it is closed.
    """
    from zlib import crc32

    cpus = sorted(os.sched_getaffinity(0))
    where = parameters.endpoint.rpartition(":")[2]
    name = f"rallypoint-{crc32(repr((parameters.run_id, where, cpus)).encode()):08x}"
    place = socket.socket(socket.AF_UNIX)
    if _is_second(place, name) and "OMP_NUM_THREADS" not in environ and len(cpus) > 1:
        log.warning(
            "another agent of job %r is running on this machine and OMP_NUM_THREADS is not set, so each worker starts "
            "threads for all %d processors; set it to each worker's share, such as OMP_NUM_THREADS=%d",
            parameters.run_id,
            len(cpus),
            len(cpus) // 2,
        )
    return place


def _is_second(place: socket.socket, name: str) -> bool:
    """Take the first free place. Returns whether it is the second one."""
    for number in range(2):
        try:
            place.bind(f"\0{name}-{number}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # this system has no abstract sockets
                return False
        else:
            return number == 1
    return False
