"""Workers of this node that go on in their processes when a round ends (`rallypoint.inprocess`).

Imported when a worker may have announced that it can. In each round

    begin_release the round is over: workers that can go on are told to leave it, the others end (`workers/release.py`)
    (a Preparation) they wait; if not all workers of the job can go on, they are ended before the new ones start
    enter a context of the new round takes them over, and they are notified

Laws:

1. A worker goes on only if one of each local rank of its node has announced itself in this run: otherwise all workers
   of the job are restarted anyway, and none is asked to leave.
2. A worker that dies while it waits is restarted, and does not count as failed in any round.
3. Processes that it has left are ended before another worker starts in its place.
"""

from __future__ import annotations

import math
from signal import SIGKILL, SIGTERM, Signals

from rallypoint.agent.sources import Preparation
from rallypoint.agent.spec import WorkerGroup
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.workers.local import LocalProcessesContext
from rallypoint.workers.resumable import LeavingWorkers, WorkerChannel

if TYPE_CHECKING:
    from rallypoint.agent.signals import GracePeriods
    from rallypoint.workers.context import PContext
    from rallypoint.workers.escalation import StopInProgress

log = get_logger(__name__)


def find_survivors(group: WorkerGroup, grace: GracePeriods, *, keeps_workers: bool) -> Survivors | None:
    """Let the workers go on that can; None as long as none has announced itself.

    `keeps_workers`: whether the rendezvous can tell other nodes that they do.
    """
    if not WorkerChannel(group.notices).announced():
        return None
    spec, why = group.spec, ""
    if not isinstance(spec.entrypoint, str):
        why = "they are functions"
    elif not keeps_workers:
        why = f"the rendezvous backend {spec.rdzv_handler.get_backend()!r} cannot tell other nodes that they do"
    if why:
        log.warning("[%s] workers do not go on in their processes when a round ends: %s", spec.role, why)
    return Survivors(group, grace, possible=not why)


class Survivors(Preparation):
    """The workers of one agent that go on. A `Preparation` of each round.

    Args:
        group: all workers of the agent.
        grace: how long workers have to end.
        possible: whether any of them can go on.
    """

    def __init__(self, group: WorkerGroup, grace: GracePeriods, *, possible: bool = True) -> None:
        self._group = group
        self._grace = grace
        self._possible = possible
        self._announced: set[int] = set()
        self._context: LocalProcessesContext | None = None
        """The context of the previous round, while some of its workers wait."""
        self._ending: StopInProgress | None = None

    def all_announced(self) -> bool:
        """Whether a worker of each local rank has announced itself in this run, and can go on.

        Call this before workers are stopped, since the files of ended workers are then removed.
        """
        if not self._possible:
            return False
        self._announced |= WorkerChannel(self._group.notices).announced()
        return self._announced.issuperset(range(self._group.spec.local_world_size))

    @staticmethod
    def make_ready() -> None:
        """Import what the end of a round needs now, while nothing waits for it."""
        import rallypoint.base.inotify
        import rallypoint.workers.handover
        import rallypoint.workers.open_writes  # noqa: F401

    # The end of a round

    def begin_release(
        self, context: PContext, death_sig: Signals, grace: float, limit: float, *, sent: bool
    ) -> StopInProgress | None:
        """Let those workers leave their round that can, and end the others; see `LocalProcessesContext.begin_release`.

        Returns:
            The stop in progress; None if no worker is in a round: those that go on have left theirs before.
        """
        assert isinstance(context, LocalProcessesContext), "only such workers are asked to leave"
        if context is self._context:  # the round is over before it has begun here
            return self._ending
        assert self._group.placement is not None
        channel = WorkerChannel(self._group.notices)
        can = channel.announced().intersection(context.running)
        leaving = LeavingWorkers(channel, sorted(can), self._group.placement.round)
        self._context = context
        return context.begin_release(leaving, self._group.spec.inprocess_timeout, death_sig, grace, limit, sent=sent)

    # While they wait

    def begin(self, group: WorkerGroup) -> None:
        """The node has entered a round."""
        context = self._context
        if context is None or not context.survivors or group.placement is None or not group.placement.restart_workers:
            return
        log.warning(
            "[%s] all workers are started anew: not all workers of the job can go on in their processes",
            group.spec.role,
        )
        self._ending = context.begin_close(SIGTERM, self._grace.of(failed=True))

    def fds(self) -> list[int]:
        """Readable when a waiting worker has ended, or when there is something to do for a stop in progress."""
        if self._ending is not None:
            return self._ending.fds()
        handover = None if self._context is None else self._context.handover
        return [] if handover is None else handover.fds()

    def wake_at(self) -> float:
        """The time of the next thing to do for a stop in progress; infinite for never."""
        return math.inf if self._ending is None else self._ending.wake_at()

    def step(self) -> None:
        """Continue what has begun; end what is left of workers that have ended while they waited."""
        if self._ending is not None:
            if not self._ending.step():
                return
            self._ending = None
        if self._context is not None and self._context.handover is not None:
            self._ending = self._context.handover.end_remains()

    def preparing(self) -> bool:
        """Whether something of the previous round has to end first."""
        self.step()
        return self._ending is not None

    def cancel(self) -> None:
        """Do nothing: what has begun to end continues to."""

    def close(self) -> None:
        """The run is over; the workers are gone."""
        self._context = None

    # The next round

    def enter(self, context: PContext) -> tuple[int, ...]:
        """Let the waiting workers enter the round of a context that is not started yet, which takes them over.

        Returns:
            Their local ranks.
        """
        assert self._group.placement is not None
        previous, self._context = self._context, None
        if previous is None or previous.handover is None or not isinstance(context, LocalProcessesContext):
            return ()
        channel, round_ = WorkerChannel(self._group.notices), self._group.placement.round
        entered = []
        for rank in previous.survivors:
            survivor = previous.handover.hand_over(rank)
            gone = dict.fromkeys(survivor.environment.keys() - context.envs[rank].keys())
            if channel.enter(rank, round_, {**gone, **context.envs[rank]}):
                context.adopt(rank, survivor)
                entered.append(rank)
            else:
                log.warning(
                    "worker %d (local rank %d) does not go on; another takes its place", survivor.process.pid, rank
                )
                survivor.process.signal(SIGKILL)
                survivor.process.release()
        size = self._group.spec.local_world_size
        channel.remove(set(range(size)).difference(entered))
        if entered:
            log.warning("[%s] %d of %d workers go on in their processes", self._group.spec.role, len(entered), size)
        return tuple(entered)
