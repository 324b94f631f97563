"""What the agent's loop waits for, and tells, beside its workers' exits: interfaces, which cost nothing at start."""

from __future__ import annotations

from rallypoint.base.light_typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rallypoint.agent.policy_state import PolicyState
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.agent.steps import Event


class Monitor(Protocol):
    """What watches or prepares workers beside their exits: the watchdog, the preload, signals. Nothing here blocks."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the monotonic clock; infinite for never."""

    def step(self) -> None:
        """Do what is due; `poll` returns what came of it."""


class Preparation(Monitor, Protocol):
    """What has to be done in a round, with other nodes maybe, before its workers can start. Nothing here blocks."""

    failure: str
    """Why the workers cannot start, in a sentence; empty if nothing has failed."""
    failed_node: str
    """The name of the node that it is about; empty for this one."""
    ends_job: bool
    """Whether the job ends by it, whatever restarts are left."""

    def begin(self, group: WorkerGroup) -> None:
        """The node has entered a round, in which the group has its place now. What was under way is forgotten."""

    def preparing(self) -> bool:
        """Whether it is under way."""

    def cancel(self) -> None:
        """The round has ended before its workers have started: forget what is under way. Idempotent."""

    def close(self) -> None:
        """The run is over. Idempotent."""


class WorkerWatch(Monitor, Protocol):
    """What watches the workers of each round for as long as they are to run. Nothing here blocks."""

    def begin_round(self, round_: int) -> None:
        """The workers of a round have been started."""

    def end_round(self) -> None:
        """The workers are about to be stopped. Idempotent."""

    def close(self) -> None:
        """The run is over. Idempotent."""


class EventObserver(Protocol):
    """What is told of the events of the agent's loop. It decides nothing, and nothing here blocks."""

    def look_at(self, event: Event, state: PolicyState) -> None:
        """Something has happened; the agent stood there before it."""

    def close(self) -> None:
        """The run is over: finish what is under way."""
