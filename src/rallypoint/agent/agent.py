"""The agent of one node: puts together its loop, its workers and its rendezvous client.

Agents that are written for torch, as subclasses, are handled by `compat.agent`, which drives the same
parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rallypoint.agent.controller import WorkerController
from rallypoint.agent.loop import AgentLoop
from rallypoint.agent.signal_set import handled_signals
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.signals import ignore_signals_at_exit
from rallypoint.protocol.errors import RendezvousGracefulExitError
from rallypoint.telemetry.lazy import profiled

if TYPE_CHECKING:
    from rallypoint.agent.pages import AgentPages
    from rallypoint.health.check import HealthCheckServer
    from rallypoint.health.progress_probe import ProgressProbe

log = get_logger(__name__)

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"


class Agent:
    """One node's part of the job.

    Args:
        workers: the workers of this node; they know its rendezvous client.
        health: a context manager that is entered for the run; yields the progress probe, if there is a health check.
    """

    def __init__(
        self, workers: WorkerController, health: AbstractContextManager[ProgressProbe | None] | None = None
    ) -> None:
        self.workers = workers
        self.health = health or nullcontext()

    @profiled("SimpleElasticAgent.run")
    def run(self, role: str = DEFAULT_ROLE, loop: Callable[[str], RunResult] | None = None) -> RunResult | None:
        """Run the workers until the job ends, in as many rounds as it takes.

        Args:
            role: the name of the workers in the log.
            loop: runs in place of `run_loop`.

        Returns:
            The result of the worker group; None for a spare that was never needed.

        Raises:
            RendezvousError: the nodes could not agree on a round.
            Exception: what a third party's rendezvous has raised, unchanged.
            SignalException: a signal has ended this agent; its workers are gone.
        """
        with ignore_signals_at_exit():
            try:
                result = (loop or self.run_loop)(role)
                self.workers.events.run_ended(result, self.workers.remaining())
                return result
            except RendezvousGracefulExitError as ending:
                log.info("%s", ending)
                return None
            finally:
                try:
                    self.workers.rendezvous.shutdown()
                finally:
                    self.workers.close()

    def run_loop(self, role: str) -> RunResult:
        """Run the loop; when it returns or raises, no worker is left."""
        workers = self.workers
        workers.prepare()
        with self.health as probe:
            log.info("[%s] starting workers for entrypoint: %s", role, workers.group.spec.get_entrypoint_name())
            return AgentLoop(workers, workers.rendezvous, probe=probe).run(handled_signals())


@contextmanager
def health_check(
    server: HealthCheckServer | None, pages: Callable[[], AgentPages] | None = None
) -> Iterator[ProgressProbe | None]:
    """Serve the health check.

    Args:
        server: None for one on the port that `TORCHELASTIC_HEALTH_CHECK_PORT` names, if it is set.
        pages: makes the further pages of that server.

    Yields:
        The progress probe that our own server shows; None if there is no such server.
    """
    probe = None
    if server is None and TORCHELASTIC_HEALTH_CHECK_PORT in os.environ:
        from rallypoint.health.check import DEFAULT_TIMEOUT, create_healthcheck_server, requested_port
        from rallypoint.health.progress_probe import ProgressProbe

        port = requested_port()
        if port is not None:
            probe = ProgressProbe()
            others = None if pages is None else pages()
            if others is not None:
                others.begin()
            server = create_healthcheck_server(
                probe.last_progress,
                port,
                DEFAULT_TIMEOUT,
                probe.status,
                None if others is None else others.answer,
                None if others is None else others.access,
            )
    if server is None:
        yield None
        return
    server.start()
    try:
        yield probe
    finally:
        server.stop()
