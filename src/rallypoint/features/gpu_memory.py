"""Makes a restart wait until ended workers have released their GPU memory.

The driver frees a process's memory after its death. A restart may follow within hundredths of a second, and the new
workers would run out of memory without a visible reason.

Laws about the reasons to wait (`judge`, which is pure):

1. An ended process that NVML lists still has memory: wait, and look again. If it kept its memory for a whole limit, do
   not wait for it again: it would delay every later restart.
2. A live process of ours (`base.gpu_holders.Holder`) is intended: no wait and no message.
3. A live process that is not ours and has much memory is named once per run. Waiting cannot help.
4. If pids mean nothing (another pid namespace), or the driver lists none, the used memory decides: wait for a second
   look, and then as long as each look finds less than the one before.

Laws about waiting (`GpuMemoryWait`):

5. The first workers of this agent never wait, since no process of ours has used a GPU.
6. The driver may hang, so only a thread calls it; at most one such thread exists. When the limit is reached, the loop
   starts the workers without waiting for the thread.
7. Errors here are never failures of the node. They are logged once, and the workers start.
8. First wait until survivors from the last round that are being ended are gone: until then they are live processes.

Messages number GPUs like `nvidia-smi`. Nothing here has been measured on a GPU yet.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.agent.feature import Feature
from rallypoint.agent.sources import Preparation, guarded
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.gpu_holders import (
    MUCH,
    Holder,
    Share,
    amount,
    describe_process,
    held_by,
    holder,
    pids_are_ours,
    visible_gpus,
)
from rallypoint.base.log import get_logger, ranges
from rallypoint.base.mailbox import Background
from rallypoint.base.nvml import GpuMemory, nvml_kept_open, nvml_memory

if TYPE_CHECKING:
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.agent.workers import WorkerController

log = get_logger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2
"""Seconds between two looks; they double from the first value to the second."""
_SECOND_LOOK = 0.02
"""Minimum seconds between two looks that only compare memory."""
_WORTH_A_LINE = 0.1
"""A wait is logged if it lasts at least this many seconds."""
_FEW = 8
"""Maximum number of processes named in one line."""


# Rules


class Look(NamedTuple):
    """One look at the GPUs that the workers see, by index; and the kinds of the listed processes by pid, or None if
    pids mean nothing.
    """

    gpus: Mapping[int, GpuMemory]
    holders: Mapping[int, Holder] | None


class MemoryVerdict(NamedTuple):
    """The memory to wait for, and the memory that processes of others use."""

    waits_for: tuple[Share, ...] = ()
    strangers: tuple[Share, ...] = ()


def judge(look: Look, before: Look | None, given_up: Collection[int] = ()) -> MemoryVerdict:
    """Judge a look.

    Args:
        look: the current look.
        before: the previous look during the same wait.
        given_up: pids of ended processes to ignore.
    """
    waits_for: list[Share] = []
    strangers: list[Share] = []
    for index, gpu in look.gpus.items():
        if look.holders is None or gpu.processes is None:
            if _may_shrink(gpu, None if before is None else before.gpus.get(index), is_first=before is None):
                waits_for.append(Share(index, 0, gpu.used))
            continue
        for process in gpu.processes:
            is_what = look.holders.get(process.pid, Holder.OTHER)
            share = Share(index, process.pid, process.used)
            if is_what is Holder.ENDED and process.pid not in given_up:
                waits_for.append(share)
            elif is_what is Holder.OTHER and process.used is not None and process.used >= MUCH:
                strangers.append(share)
    return MemoryVerdict(tuple(waits_for), tuple(strangers))


def _may_shrink(gpu: GpuMemory, before: GpuMemory | None, *, is_first: bool) -> bool:
    """Whether the used memory alone is a reason to look again (law 4)."""
    if gpu.used is None:
        return False
    return is_first or (before is not None and before.used is not None and gpu.used < before.used)


# Looks


def driver_looks(job: str) -> Generator[Look]:
    """Yield a look per request; nothing without a working NVIDIA library."""
    own_pid, namespace_is_first = os.getpid(), pids_are_ours()
    with nvml_kept_open() as works:
        while works:
            gpus = visible_gpus(nvml_memory(), os.environ)
            pids = {process.pid for gpu in gpus.values() for process in gpu.processes or ()}
            yield Look(gpus, {pid: holder(pid, own_pid, job) for pid in pids} if namespace_is_first else None)


class Watch:
    """One wait, as the looking thread sees it.

    Args:
        looks: yields a look per request.
        given_up: pids of ended processes to ignore.
    """

    def __init__(self, looks: Callable[[], Generator[Look]], given_up: Collection[int] = ()) -> None:
        self.over = threading.Event()
        """Set when nobody is waiting for the thread any more."""
        self.ended = False
        """Whether the thread has returned from the driver."""
        self.failed = False
        self.verdict: MemoryVerdict | None = None
        """The verdict on the last look; None until the driver answers."""
        self.gpus: frozenset[int] = frozenset()
        """The GPUs whose memory the thread waited for."""
        self.names: Mapping[int, str] = {}
        """Names for messages of processes that are not ours, by pid."""
        self._looks = looks
        self._given_up = frozenset(given_up)

    def run(self) -> Watch:
        """Look until no memory is left to wait for. Runs on a thread."""
        try:
            self._look()
        except Exception:
            self.failed = True
            log.exception(
                "checking GPU memory failed; restarts will no longer wait for it. This is a bug in Rallypoint (please "
                "report it)"
            )
        finally:
            self.ended = True
        return self

    def _look(self) -> None:
        before, pause = None, _FIRST_PAUSE
        with closing(self._looks()) as looks:
            for look in looks:
                verdict = judge(look, before, self._given_up)
                unnamed = {share.pid for share in verdict.strangers} - self.names.keys()
                self.names = {**self.names, **{pid: describe_process(pid) for pid in unnamed}}
                self.gpus |= {share.gpu for share in verdict.waits_for}
                self.verdict = verdict  # set last: the loop might read it at any time
                if not verdict.waits_for:
                    return
                compares = any(not share.pid for share in verdict.waits_for)
                if self.over.wait(max(pause, _SECOND_LOOK) if compares else pause):
                    return
                before, pause = look, min(2 * pause, _LONGEST_PAUSE)


# Restarts


class MemoryWait(Feature):
    """Makes each restart of one agent wait. Created after the first workers start (law 5)."""

    def preparations(self) -> Iterable[Preparation]:
        return (GpuMemoryWait(self.workers, self.workers.group.spec.features.recovery.gpu_memory_timeout),)


class GpuMemoryWait(Preparation):
    """One agent's waits, in every round but its first.

    Args:
        workers: the agent's workers.
        timeout: the maximum number of seconds that a restart waits.
        looks: yields the looks of one wait for a job; called and driven on its thread.
        clock: the clock for the limit.
    """

    def __init__(
        self,
        workers: WorkerController,
        timeout: float,
        looks: Callable[[str], Generator[Look]] = driver_looks,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.failure = self.failed_node = ""
        self.ends_job = False
        self._workers = workers
        self._timeout = timeout
        self._looks = partial(looks, workers.group.spec.rdzv_handler.get_run_id())
        self._clock = clock
        self._work: Background[Watch] = Background("rallypoint-gpu-memory")
        self._due = False
        """Whether to start waiting as soon as no survivor is being ended."""
        self._until = math.inf
        """When the workers start in any case; infinity without a wait."""
        self._watch: Watch | None = None
        """This round's watch, if its thread started."""
        self._last: Watch | None = None
        """The last watch whose thread started. The thread may still be in the driver."""
        self._is_silent = False
        """Whether the driver did not answer `_last` in time."""
        self._is_off = False
        self._given_up: set[int] = set()
        self._named: set[int] = set()

    def begin(self, group: WorkerGroup) -> None:
        self.cancel()
        if self._is_off or not self._workers.started_at:
            return
        self._due = not (self._is_silent and self._in_driver())

    def preparing(self) -> bool:
        return self._due or self._until < math.inf

    def fds(self) -> list[int]:
        return self._work.fds()

    def wake_at(self) -> float:
        return 0.0 if self._due and not self._survivors_end() else self._until

    def step(self) -> None:
        if not guarded("the wait for GPU memory", self._step):
            self._is_off = True
            self.cancel()

    def _step(self) -> None:
        done, now = self._work.take_result(), self._clock.monotonic()
        if self._due and not self._survivors_end():
            self._due, self._until = False, now + self._timeout
        if self._until == math.inf:
            return
        if done is not None:
            self._conclude(done, self._timeout - (self._until - now))
        elif now >= self._until:
            self._give_up()
        elif self._watch is None and not self._in_driver():  # otherwise the loop wakes when it ends
            self._start()

    def cancel(self) -> None:
        if self._watch is not None:
            self._watch.over.set()
        self._work.forget()
        self._due, self._until, self._watch = False, math.inf, None

    def close(self) -> None:
        self.cancel()
        self._work.close()

    def _in_driver(self) -> bool:
        return self._last is not None and not self._last.ended

    def _survivors_end(self) -> bool:
        """Whether `HeldWorkers` is ending processes from the previous round (law 8)."""
        context = self._workers.pcontext
        stop = None if context is None else context.stopping
        return stop is not None and not stop.done

    def _start(self) -> None:
        watch = Watch(self._looks, self._given_up)
        if self._work.start(watch.run):
            self._watch = self._last = watch
            self._is_silent = False
            return
        self.cancel()
        log.warning("starting the workers without checking GPU memory: this machine does not allow any more threads")

    def _conclude(self, watch: Watch, seconds: float) -> None:
        """Start the workers: the thread has nothing left to wait for."""
        self.cancel()
        self._is_off = watch.failed
        self._warn_of_strangers(watch)
        if seconds < _WORTH_A_LINE:
            return
        gpus = ", ".join(ranges(watch.gpus))
        what = f"the memory of GPU {gpus}" if gpus else "an answer from NVIDIA's driver"
        log.info("the restart waited %.2f s for %s", seconds, what)

    def _give_up(self) -> None:
        """Log the findings when the limit is reached, and let the workers start."""
        watch, verdict = self._watch, None if self._watch is None else self._watch.verdict
        self.cancel()
        if watch is None or verdict is None:
            self._is_silent = True
            log.warning(
                "starting the workers without checking GPU memory: NVIDIA's driver did not answer within %g s",
                self._timeout,
            )
            return
        self._warn_of_strangers(watch)
        ended = [share for share in verdict.waits_for if share.pid]
        self._given_up |= {share.pid for share in ended}
        texts = held_by(ended, {share.pid: f"pid {share.pid}, which has ended" for share in ended})
        texts += [f"GPU {share.gpu}: {amount(share.used)} in use" for share in verdict.waits_for if not share.pid]
        more = f"; and {len(texts) - _FEW} more" if len(texts) > _FEW else ""
        log.warning(
            "starting the workers even though GPU memory was still in use after %g s (--gpu-memory-timeout): %s%s",
            self._timeout,
            "; ".join(texts[:_FEW]),
            more,
        )

    def _warn_of_strangers(self, watch: Watch) -> None:
        """Name each process that is not ours once per run."""
        shares = watch.verdict.strangers if watch.verdict is not None else ()
        names = watch.names  # read them after the verdict, since the thread writes them before it
        new = [share for share in shares if share.pid not in self._named]
        self._named |= {share.pid for share in new}
        for text in held_by(new, names):
            log.warning("%s, which is not part of this job", text)
