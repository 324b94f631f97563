"""The simulated workers of one node, which are stubborn: they run whether or not their agent does.

Workers that can continue in their processes leave a round one by one, get stuck, or die on the way out or while they
wait for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.scenario import INPROCESS_TIMEOUT, FailureRates, NodePlan
from tests.sim.world import Timer, World

if TYPE_CHECKING:
    from tests.sim.ground_truth import RoundName


class Exit(NamedTuple):
    """How the workers ended by themselves."""

    succeeded: bool
    failure: int = 0
    """Which failure of the job this is, from 1."""


_STUCK, _DIES = 0.1, 0.1
"""The shares of the workers that do not come out of their round, and that die on the way or while they wait."""


class SimWorkers:
    """One node's workers, from round to round."""

    def __init__(
        self,
        world: World,
        rng: Random,
        temper: FailureRates,
        grace: float,
        calm: float,
        yard: WorkerProcesses,
        plan: NodePlan,
    ) -> None:
        self.running: RoundName | None = None
        self.exit: Exit | None = None
        self._world = world
        self._rng = rng
        self._temper = temper
        self._grace = grace
        self._calm = calm
        self._yard = yard
        self._timer: Timer | None = None
        self.on_exit: Callable[[], None] = _nothing
        self.size, self.resumable = plan.size, plan.resumable
        self.have_run = False
        """Whether there was a round before."""
        self.survivors: set[int] = set()
        """Local ranks that wait in their processes for the next round."""
        self._coming_out: set[int] = set()
        # A stream of its own: what the others draw does not depend on it.
        self._fates = Random(f"survivors/{plan.number}/{calm}")

    @property
    def restarted(self) -> bool:
        """Whether workers of the round before cannot go on in their processes."""
        return self.have_run and not self.resumable

    def start(self, name: RoundName) -> None:
        """The workers of a round begin, those among them that have survived the one before."""
        self.running, self.exit = name, None
        self.have_run = True
        self.survivors.clear()
        rng, temper = self._rng, self._temper
        self._yard.enter(name, self)
        draw = rng.random()
        length = rng.uniform(temper.shortest, temper.longest)
        if self._world.now < self._calm and draw < temper.fails:
            self._timer = self._world.after(rng.uniform(0.01, length), self.fail)
        elif self._world.now < self._calm and draw < temper.fails + temper.hangs:
            self._timer = self._world.at(self._calm + rng.random(), self._succeed)
        else:
            self._timer = self._world.after(length, self._succeed)

    def fail(self) -> None:
        """A worker fails, if they still run."""
        if self.running is not None and self.exit is None:
            self._end(Exit(False, self._yard.failed()))

    def has_failure(self) -> None:
        """The workers of another node of this round are gone: these may fail for it."""
        if self.running is not None and self.exit is None and self._rng.random() < self._temper.infects:
            self._world.after(self._rng.uniform(0.0, 1.0), self._fail_in, self.running)

    def stop_time(self) -> float:
        """How long the workers take to end when they are told to."""
        return self._rng.uniform(0.0, self._grace) if self.running is not None and self.exit is None else 0.0

    def release_time(self) -> float:
        """The workers are told that their round is over: how long the last one takes to come out or to be ended."""
        if self.running is None:
            return 0.0
        rng, longest = self._fates, 0.0
        self._coming_out = set()
        if self.exit is not None and self.exit.succeeded:
            return 0.0
        died = -1 if self.exit is None else rng.randrange(self.size)
        for rank in range(self.size):
            if rank == died:
                continue
            if rng.random() < _STUCK:
                longest = INPROCESS_TIMEOUT
                continue
            takes = rng.uniform(0.0, 0.2)
            longest = max(longest, takes)
            if rng.random() >= _DIES:
                self._coming_out.add(rank)
        return longest

    def released(self) -> None:
        """All have come out or have been ended."""
        if self.running is None:  # the round ended before they had entered it
            return
        self.survivors, self._coming_out = self._coming_out, set()
        self._end_round()
        for rank in sorted(self.survivors):
            if self._fates.random() < _DIES:
                self._world.after(self._fates.uniform(0.0, 1.0), self.survivors.discard, rank)

    def gone(self) -> None:
        """The workers have been ended, those that wait for the next round too."""
        self.survivors = set()
        self._end_round()

    def _end_round(self) -> None:
        name, self.running = self.running, None
        if self._timer is not None:
            self._timer.cancel()
        if name is not None:
            self._yard.leave(name, self)

    def _succeed(self) -> None:
        if self.running is not None and self.exit is None:
            self._end(Exit(True))

    def _fail_in(self, name: RoundName) -> None:
        if self.running == name:
            self.fail()

    def _end(self, ending: Exit) -> None:
        self.exit = ending
        if self._timer is not None:
            self._timer.cancel()
        if not ending.succeeded and self.running is not None:
            self._yard.leave(self.running, self)
        self.on_exit()


class WorkerProcesses:
    """The workers of all nodes of the job: what happens to one is felt by those of its round."""

    def __init__(self) -> None:
        self.failures = 0
        self._groups: dict[RoundName, list[SimWorkers]] = {}

    def enter(self, name: RoundName, workers: SimWorkers) -> None:
        """The workers run in the round."""
        self._groups.setdefault(name, []).append(workers)

    def leave(self, name: RoundName, workers: SimWorkers) -> None:
        """The workers are no longer there for the others."""
        groups = self._groups.get(name, [])
        if workers in groups:
            groups.remove(workers)
            for each in groups:
                each.has_failure()

    def failed(self) -> int:
        """The number of a new failure."""
        self.failures += 1
        return self.failures


def _nothing() -> None:
    return None
