"""Workers of this node that keep their processes when a round ends (`rallypoint.inprocess`).

Imported when a worker might have announced this. In each round:

    begin_release      the round has ended: workers leave it if they can, the others end (`workers/stop.py`)
    (a Preparation)    they wait; if not all workers of the job can, they are ended before the new ones start
    enter              the new round's context takes them over, and they are notified

Laws:

1. A worker keeps its process only if a worker with each local rank on its node announced itself in this run: otherwise
   all workers of the job are restarted anyway, and none is asked to leave.
2. A worker that dies while waiting is restarted, and does not count as a failure in any round.
3. Its leftover processes are ended before another worker starts in its place.
4. A program whose process cannot enter another round is not tried again. If a library remembers the previous round's
   world, as a singleton in accelerate does, each survivor's function fails at once:
       1. rank 0 is killed; rank 1 survives, and fails at the first line of its next round, which is a failure like any
          other;
       2. now rank 0, which was new, would survive and fail, and so on, until no restart is left.
   So the first such failure disables this for the run: all workers of the job are new in each later round.
"""

from __future__ import annotations

from collections.abc import Mapping
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.sources import Preparation
from rallypoint.agent.spec import WorkerGroup
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.features.inprocess.channel import ReleasedWorkers, WorkerChannel

if TYPE_CHECKING:
    from rallypoint.agent.signals import GracePeriods
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.workers.context import PContext
    from rallypoint.workers.stop import Stop

log = get_logger(__name__)

_ENTRY_SECONDS = 10.0
"""Seconds from a round's start within which a survivor's failure counts as a failed entry. Two of them pass while it
waits to see whether the failure is a consequence of another one (`inprocess.rounds`)."""
_FROM_OUTSIDE = frozenset((SIGHUP, SIGINT, SIGKILL, SIGTERM))
"""Signals that end a worker from outside, and are not its fault."""


class InProcess(Feature):
    """Lets one agent's workers continue in their processes, once a worker announces that it can."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._held: HeldWorkers | None = None

    def keeper(self) -> HeldWorkers | None:
        workers = self.workers
        if self._held is None and WorkerChannel(workers.group.notices).announced():
            self._held = HeldWorkers(workers.group, workers.grace, possible=self._is_possible())
            workers.add_preparation(self._held)
        return self._held if self._held is not None and self._held.all_announced() else None

    def _is_possible(self) -> bool:
        spec, why = self.workers.group.spec, ""
        if not isinstance(spec.entrypoint, str):
            why = "they are functions"
        elif not self.workers.rendezvous.keeps_workers:
            why = f"the rendezvous backend {spec.rdzv_handler.get_backend()!r} cannot report this to other nodes"
        if why:
            log.warning("[%s] workers are restarted in new processes when a round ends: %s", spec.role, why)
        return not why


class HeldWorkers(Preparation):
    """One agent's workers that keep their processes; a `Preparation` of each round.

    Args:
        group: all workers of the agent.
        grace: how much time workers get to end.
        possible: whether any of them can keep its process.
    """

    def __init__(self, group: WorkerGroup, grace: GracePeriods, *, possible: bool = True) -> None:
        self._group = group
        self._grace = grace
        self._possible = possible
        self._announced: set[int] = set()
        self._context: PContext | None = None
        """The previous round's context, while some of its workers are waiting."""

    def all_announced(self) -> bool:
        """Whether a worker with each local rank announced itself in this run.

        Call this before workers are stopped, because ended workers' files are then removed.
        """
        if not self._possible:
            return False
        self._announced |= WorkerChannel(self._group.notices).announced()
        return self._announced.issuperset(range(self._group.spec.local_world_size))

    def note_failures(self, failures: Mapping[int, ProcessFailure], seconds: float, *, progress: bool) -> None:
        """Check whether a failed worker could not enter another round in its process.

        Args:
            failures: the failures by local rank.
            seconds: from the start of the round to now.
            progress: whether a worker of this node reported progress in the round.
        """
        if progress or seconds > _ENTRY_SECONDS or not self._possible:
            return
        for rank in self._group.survived:
            failure = failures.get(rank)
            if failure is not None and -failure.exitcode not in _FROM_OUTSIDE:
                self._possible = False
                why = f"local rank {rank} failed as soon as it entered another round in its process"
                log.warning(
                    "[%s] %s; from now on, all workers will be restarted in new processes", self._group.spec.role, why
                )
                hint = f"{why}: something in it still belongs to the previous round"
                failure.context = "\n".join(filter(None, (failure.context, hint)))

    @staticmethod
    def make_ready() -> None:
        """Import the modules for the end of a round now, while nothing waits for them."""
        import rallypoint.base.inotify  # noqa: F401

    # End of a round

    def begin_release(
        self, context: PContext, death_sig: Signals, grace: float, limit: float, *, sent: bool
    ) -> Stop | None:
        """Let workers leave their round if they can, and end the others; see `PContext.begin_close`.

        Returns:
            The stop, which may already be complete if the workers left their round. None without one.
        """
        if context is self._context:  # the round ended before it began here
            return context.stopping
        assert self._group.placement is not None
        channel = WorkerChannel(self._group.notices)
        can = channel.announced().intersection(context.running)
        leaving = ReleasedWorkers(channel, sorted(can), self._group.placement.round)
        self._context = context
        seconds = self._group.spec.features.recovery.inprocess_timeout
        return context.begin_close(death_sig, grace, limit, sent=sent, leaving=leaving, leaving_time=seconds)

    # While they wait

    def begin(self, group: WorkerGroup) -> None:
        """Begin a round that the node entered."""
        context = self._context
        if context is None or not context.held or group.placement is None or not group.placement.restart_workers:
            return
        log.warning(
            "[%s] restarting all workers in new processes, because not all workers of the job can keep theirs",
            group.spec.role,
        )
        context.begin_close(SIGTERM, self._grace.seconds(failed=True))

    def preparing(self) -> bool:
        """Whether processes of the previous round must end first, as of the last look."""
        stop = None if self._context is None else self._context.stopping
        return stop is not None and not stop.done

    def cancel(self) -> None:
        """Do nothing: a stop in progress continues."""

    def close(self) -> None:
        self._context = None

    # Next round

    def enter(self, context: PContext) -> tuple[int, ...]:
        """Let the waiting workers enter the round of a context that has not started yet, which takes them over.

        Returns:
            Their local ranks.
        """
        assert self._group.placement is not None
        previous, self._context = self._context, None
        if previous is None:
            return ()
        channel, round_ = WorkerChannel(self._group.notices), self._group.placement.round
        pids, entered = previous.pids(), []
        for rank in previous.held:
            gone = dict.fromkeys(previous.envs[rank].keys() - context.envs[rank].keys())
            context.relabel(rank, previous.output_of(rank))
            if channel.enter(rank, round_, {**gone, **context.envs[rank]}):
                context.adopt(rank, previous.hand_over(rank))
                entered.append(rank)
            else:
                log.warning("worker process %d (local rank %d) cannot continue and is being replaced", pids[rank], rank)
        previous.end_held(spared=[pids[rank] for rank in entered])
        size = self._group.spec.local_world_size
        channel.remove(set(range(size)).difference(entered))
        if entered:
            log.warning("[%s] %d of %d workers keep their processes", self._group.spec.role, len(entered), size)
        return tuple(entered)
