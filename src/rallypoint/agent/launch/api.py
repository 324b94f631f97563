"""Makes the rendezvous, the spec and the agent of a job from its config, and runs it (contract section 8)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rallypoint.agent.launch.config import IN_PLACE_OF, LaunchConfig, describe
from rallypoint.agent.loop import run_agent
from rallypoint.agent.rendezvous_client import rendezvous_of
from rallypoint.agent.signals import SIGNALS_VARIABLE, GracePeriods
from rallypoint.agent.spec import RunResult, WorkerSpec, program_name
from rallypoint.agent.workers import WorkerController
from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, SignalException
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.base.secrets import take_from_environment
from rallypoint.base.signals import ignore_signals_at_exit
from rallypoint.rendezvous.handler import get_rendezvous_handler
from rallypoint.rendezvous.params import RendezvousParameters

if TYPE_CHECKING:
    from rallypoint.base.http import Access, Handler
    from rallypoint.failures.report import ChildFailedError
    from rallypoint.observe.health.check import HealthCheckServer, ProgressProbe

log = get_logger(__name__)


class elastic_launch:
    """Launches an entry point under a config: `elastic_launch(config, entrypoint)(*args)`.

    Calling it runs this node's agent until the job ends and returns the return value of each worker of this node, by
    global rank (None for programs).
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
        """Run the job with these arguments for the entry point. Raises as `launch_agent` does."""
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
        entrypoint: a program to run (the path of an interpreter, say), or a function to call.
        args: its arguments; for a function, what can be pickled, unless the start method is fork.
        health_check_server: see `observe.health.check.health_check`.

    Returns:
        Global rank to return value, of this node's workers; empty for a spare that was not needed.

    Raises:
        UserError: something in the config cannot work.
        ChildFailedError: workers failed; it carries the first failure of the job.
        PreflightError: this node has failed a check that was required.
        RendezvousError: the nodes did not form a round.
        JobPreempted: the whole job was preempted.
        SignalException: a signal ended this agent; a `NodeLeftInOrder` if the job goes on without this node.
    """
    if entrypoint is None:
        from rallypoint.base.errors import user_error

        text = "there is nothing to launch: the entry point is None; give a program or a function"
        raise user_error(text, AssertionError)
    if config.event_log_handler != "null":
        from rallypoint.observe.telemetry.handlers import get_logging_handler

        get_logging_handler(config.event_log_handler)  # before anything is started
    run_id = config.run_id or _random_run_id()
    log.info("launching:\n%s", describe(config, program_name(entrypoint, args)))
    os.environ[SIGNALS_VARIABLE] = config.signals_to_handle
    take_from_environment()
    assert config.logs_specs is not None
    parameters = _parameters(config, run_id)
    with ignore_signals_at_exit(), _warn_of_shared_host(parameters):
        try:
            if config.features.checks.preflight:
                from rallypoint.agent.launch.preflight import check_node

                check_node(config, parameters)
            workers = _workers(config, entrypoint, args, parameters)
            health = _health(workers, config, health_check_server)
            return _run(workers, health, config.role, program_name(entrypoint, args))
        finally:
            config.logs_specs.clean_up()


def _warn_of_shared_host(parameters: RendezvousParameters) -> AbstractContextManager[None]:
    if parameters.max_nodes == 1:
        return nullcontext()
    from rallypoint.agent.launch.shared_host import register_on_host

    return register_on_host(parameters, os.environ)


def _run(
    workers: WorkerController, health: AbstractContextManager[ProgressProbe | None], role: str, name: str
) -> dict[int, Any]:
    """Run the agent, and record how it ended: if the job fails, its agent has not succeeded."""
    events = workers.events
    try:
        result = run_agent(workers, role, health)
        if result is not None and result.is_failed():
            raise _failure(result, name)
    except NodeLeftInOrder as left:
        events.record(events.succeeded)
        events.agent_ended("left", left)
        raise
    except Exception as error:
        events.record(events.failed)
        events.agent_ended("interrupted" if isinstance(error, SignalException | JobPreempted) else "failed", error)
        raise
    events.record(events.succeeded)
    events.agent_ended("succeeded")
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
    _add_what_is_asked_for(workers, config, parameters)

    return workers


def _health(
    workers: WorkerController, config: LaunchConfig, server: HealthCheckServer | None
) -> AbstractContextManager[ProgressProbe | None]:
    """The health check, for the time of the run."""
    if server is None and "TORCHELASTIC_HEALTH_CHECK_PORT" not in os.environ:
        return nullcontext()
    from rallypoint.observe.health.check import health_check

    def pages() -> tuple[Handler, Access]:
        from rallypoint.agent.features.pages import AgentPages

        return AgentPages(workers, config.rdzv_configs).begin()

    return health_check(server, pages)


def _add_what_is_asked_for(workers: WorkerController, config: LaunchConfig, parameters: RendezvousParameters) -> None:
    """Add the parts that only some runs have, and that only those import."""
    asked = config.features
    if asked.output.incident_dir:
        from rallypoint.agent.features.incidents import record_incidents

        record_incidents(workers, asked.output.incident_dir)

    if asked.hangs.hang_timeout:
        from rallypoint.agent.features.hangs import add_hang_watch

        add_hang_watch(workers, asked.hangs.hang_timeout)
    if asked.checks.preflight:
        from rallypoint.agent.features.mesh import add_mesh

        add_mesh(workers, asked.checks.preflight, parameters.max_nodes)
    if asked.checks.node_check:
        from rallypoint.agent.features.node_check import NodeCheck

        command, timeout = asked.checks.node_check, asked.checks.node_check_timeout
        workers.begin_check = lambda: NodeCheck(command, timeout, workers.ensure_reaper())
    if asked.frameworks.worker_env:
        from rallypoint.agent.features.worker_env import add_worker_env

        add_worker_env(workers, asked.frameworks.worker_env, parameters.max_nodes)
    if asked.frameworks.socket_ifname:
        from rallypoint.agent.features.socket_ifname import add_socket_ifname

        add_socket_ifname(workers, asked.frameworks.socket_ifname)


def _random_run_id() -> str:
    from random import SystemRandom

    run_id = str(SystemRandom().randrange(10**9))
    log.warning("the config has no run_id; this agent goes by %s, which no other agent will share", run_id)
    return run_id
