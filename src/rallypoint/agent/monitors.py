"""Interfaces to what the agent's loop waits for and notifies, besides its workers' exits. Cheap to import."""

from __future__ import annotations

from rallypoint.base.light_typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rallypoint.agent.policy_state import PolicyState
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.agent.steps import Event


class Monitor(Protocol):
    """Watches or prepares workers, apart from their exits: the watchdog, the preload, signals. Nothing here blocks."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""

    def wake_at(self) -> float:
        """The time of the next thing to do, in seconds on the monotonic clock; infinite for never."""

    def step(self) -> None:
        """Do what is due; `poll` returns the result."""


class Preparation(Monitor, Protocol):
    """Work that a round requires, possibly with other nodes, before its workers can start. Nothing here blocks."""

    failure: str
    """A sentence on why the workers cannot start; empty if nothing has failed."""
    failed_node: str
    """The name of the node that has failed; empty for this one."""
    ends_job: bool
    """Whether the failure ends the job, whatever restarts are left."""

    def begin(self, group: WorkerGroup) -> None:
        """The node has entered a round, in which the group now has its place. Work in progress is dropped."""

    def preparing(self) -> bool:
        """Whether it is in progress."""

    def cancel(self) -> None:
        """The round has ended before its workers have started: drop work in progress. Idempotent."""

    def close(self) -> None:
        """The run is over. Idempotent."""


class WorkerWatch(Monitor, Protocol):
    """Watches the workers of each round while they are meant to run. Nothing here blocks."""

    def begin_round(self, round_: int) -> None:
        """The workers of a round have been started."""

    def end_round(self) -> None:
        """The workers are about to be stopped. Idempotent."""

    def close(self) -> None:
        """The run is over. Idempotent."""


class EventObserver(Protocol):
    """Is notified of the events of the agent's loop. It decides nothing, and nothing here blocks."""

    def look_at(self, event: Event, state: PolicyState) -> None:
        """An event has occurred; `state` is the agent's state before it."""

    def close(self) -> None:
        """The run is over: finish work in progress."""
