"""Hands workers that go on in their processes from the context of one round to that of the next.

Laws:

1. A worker that has not left the round when its stop is done has ended, and nothing that it has left goes on.
2. A worker that has ended while it waited is not a survivor; nothing that it has left goes on either.
3. `hand_over` is called once for a worker, which no longer belongs to this context then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from signal import SIGTERM

from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.logs.outputs import Outputs
from rallypoint.workers.escalation import Escalation, StopInProgress
from rallypoint.workers.process import ChildProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.release import Release
from rallypoint.workers.sweep import Sweep

if TYPE_CHECKING:
    from rallypoint.workers.resumable import LeavingWorkers

log = get_logger(__name__)


class Survivor(NamedTuple):
    """A worker that goes on in its process. `outputs` are those of the start that it is from, `environment` is what the
    agent has last set for it.
    """

    process: ChildProcess
    outputs: Outputs
    environment: Mapping[str, str]


class Handover:
    """The handover from one context.

    Args:
        reaper: of its workers.
        processes, outputs, environments: its own, by local rank. Those of workers that are handed over are removed.
    """

    def __init__(
        self,
        reaper: ReaperClient,
        processes: dict[int, ChildProcess],
        outputs: dict[int, Outputs],
        environments: Mapping[int, Mapping[str, str]],
    ) -> None:
        self._reaper = reaper
        self._processes = processes
        self._outputs = outputs
        self._environments = environments
        self._release: Release | None = None
        self._waiting: tuple[int, ...] = ()
        self.over = False
        """Whether no worker is in the round any more."""
        self.waited: tuple[int, ...] = ()
        """The workers that waited when all workers were to be ended from elsewhere."""

    def begin(self, leaving: LeavingWorkers, others: StopInProgress, timeout: float, limit: float) -> StopInProgress:
        """Begin to end all workers except those that leave their round in time; for the arguments see `Release`."""
        self._release = Release(leaving, self._processes, others, self._sweep, timeout, limit, self._done)
        return self._release

    def shorten(self, until: float) -> None:
        """Give no worker longer than until this moment on the clock to leave, or to end."""
        if self._release is not None:
            self._release.shorten(until)

    def keep_nobody(self, number: int, grace: float) -> None:
        """Let no worker go on after the stop in progress: see `Release`."""
        if self._release is not None:
            self._release.keep_nobody(number, grace)

    def give_up(self) -> None:
        """All workers are ended from elsewhere: none is a survivor any more."""
        self._waiting, self.waited = (), self.survivors
        if self._release is not None:
            self._release.close()

    @property
    def survivors(self) -> tuple[int, ...]:
        """Local ranks of the workers that have left the round, and wait; none before its stop is done."""
        return tuple(rank for rank in self._waiting if self._processes[rank].poll() is None)

    def fds(self) -> list[int]:
        """Descriptors that become readable when a waiting worker has ended."""
        return [each.fileno() for rank in self._waiting if not (each := self._processes[rank]).held_by_debugger]

    def end_remains(self) -> StopInProgress | None:
        """Begin to end what is left of workers that have ended while they waited; None if none has."""
        left = self.survivors
        ended = set(self._waiting).difference(left)
        if not ended:
            return None
        for rank in sorted(ended):
            pid = self._processes[rank].pid
            log.warning("worker %d (local rank %d) has ended while it waited; it is started anew", pid, rank)
        self._keep(left)
        return Escalation([], self._sweep(left), SIGTERM, 0.0)

    def hand_over(self, rank: int) -> Survivor:
        """Hand the worker of a local rank to the context of the next round."""
        self._waiting = tuple(each for each in self._waiting if each != rank)
        return Survivor(self._processes.pop(rank), self._outputs.pop(rank), self._environments[rank])

    def _sweep(self, spared: Sequence[int]) -> Sweep:
        ended = [each for rank, each in self._processes.items() if rank not in spared]
        return Sweep(self._reaper, ended, [self._processes[rank].pid for rank in spared])

    def _done(self, survivors: Sequence[int]) -> None:
        self.over = True
        log.info("%d of %d workers wait in their processes for the next round", len(survivors), len(self._processes))
        self._keep(survivors)

    def _keep(self, survivors: Sequence[int]) -> None:
        """Keep these, which go on: release all others, and write their remaining output. Idempotent."""
        self._waiting = tuple(survivors)
        for rank, process in self._processes.items():
            if rank not in survivors:
                process.release()
        used = {id(self._outputs[rank]) for rank in survivors}
        for rank, outputs in self._outputs.items():
            if id(outputs) not in used:
                outputs.close()
            elif rank not in survivors:
                outputs.end(rank)
