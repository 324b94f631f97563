"""What the agent's loop waits for and drives, and who is told what happens in it. Cheap to import."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rallypoint.base.light_typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rallypoint.agent.policy import PolicyState
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.agent.steps import Event, Step


class Source(Protocol):
    """Something that the loop waits for and drives. Nothing here blocks."""

    def fds(self) -> Iterable[int]:
        """Descriptors that become readable when there is something to do."""
        return ()

    def wake_at(self) -> float:
        """The time of the next thing to do, in seconds on the monotonic clock; infinite for never."""
        return math.inf

    def step(self) -> Iterable[Event] | None:
        """Do what is due."""
        return ()


class Preparation(Source, Protocol):
    """Work that a round requires, possibly with other nodes, before its workers can start."""

    failure: str = ""
    """A sentence on why the workers cannot start; empty if nothing has failed."""
    failed_node: str = ""
    """The name of the node that has failed; empty for this one."""
    ends_job: bool = False
    """Whether the failure ends the job, whatever restarts are left."""

    def begin(self, group: WorkerGroup) -> None:
        """The node has entered a round, in which the group now has its place. Work in progress is dropped."""

    def preparing(self) -> bool:
        """Whether it is in progress."""
        return False

    def cancel(self) -> None:
        """The round has ended before its workers have started: drop work in progress. Idempotent."""

    def close(self) -> None:
        """The run is over. Idempotent."""


class RoundWatch(Source, Protocol):
    """Watches the workers of each round while they are meant to run."""

    def begin_round(self, round_: int) -> None:
        """The workers of a round have been started."""

    def end_round(self) -> None:
        """The workers are about to be stopped. Idempotent."""


class Observer(Protocol):
    """Is told what happens in the loop. It decides nothing, and nothing here blocks."""

    def __call__(
        self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...], /
    ) -> None:
        """An event has been decided on, and the steps follow; None is the beginning of the run."""
