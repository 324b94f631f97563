"""The jobs that one server coordinates, as connections, watchers and pages look them up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.coordinator.dispatcher import Dispatcher
    from rallypoint.protocol.handshake import Hello
    from rallypoint.protocol.observation import JobSummary


class JobDirectory(Protocol):
    """One job (`dispatcher.Dispatcher`) or any number (`jobs.ManyJobs`)."""

    @property
    def job(self) -> str | None:
        """The one job that nodes must be of; None takes any."""
        ...

    def dispatcher_for(self, hello: Hello, peer: str) -> Dispatcher:
        """The dispatcher of the job of an authenticated node. HandshakeError if there is none.

        `peer` is the address that its connection comes from.
        """
        ...

    def find(self, job: str) -> Dispatcher | None:
        """The dispatcher of a job, for watchers; with an empty `job`, of the only one."""
        ...

    def summaries(self) -> tuple[JobSummary, ...]:
        """All jobs, one line each."""
        ...


class ServedJobs(JobDirectory, Protocol):
    """The jobs of a server, which also calls their `tick`."""

    on_change: Callable[[], None]
    """Called after each event, from any thread: `wake_at` may have moved."""

    def now(self) -> float:
        """The present time on the clock of `wake_at`."""
        ...

    def wake_at(self) -> float:
        """The time at which `tick` should be called next; infinity for never."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...
