"""Standby workers on this node (`--standby`): processes that have done everything except enter a round.

Imported only with the flag. Each starts like a worker, without a rank, and waits in `rallypoint.inprocess` like a
worker between two rounds. The coordinator and other nodes do not know about it.

Laws:

1. Start one only if a worker has announced that its function has a `prepare` or, on a node that waits for its first
   round, if the script's text contains one: any other script would train on its own, without a rank.
2. Until it enters a round, it belongs to none: no sweep touches it, and its end is not a failure. After that, it is a
   worker.
3. Start it when the current workers have made progress, or `START_AFTER` after their start, with a low priority if
   that can be restored; their imports are preloaded first.
4. Log each standby worker that ends or gets stuck. After `MAX_LOST` of them with no entry into a round
   in between, start no more.
5. Nothing here blocks, except for the milliseconds in which a process starts or is killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from signal import SIGKILL
from typing import Any

from rallypoint.agent.facts import WaitingProcess
from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.sources import Source
from rallypoint.agent.spec import WorkerState
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.errors import RallypointError
from rallypoint.base.kernel import readable
from rallypoint.base.log import get_logger
from rallypoint.base.process_table import read_stat
from rallypoint.base.side_thread import start_thread
from rallypoint.features.inprocess.channel import WorkerChannel
from rallypoint.notices import STANDBY_VARIABLE
from rallypoint.notices import VARIABLE as NOTICES_VARIABLE
from rallypoint.workers.context import HeldWorker, PContext, SubprocessContext, macros

log = get_logger(__name__)

START_AFTER = 10.0
"""Seconds between the start of workers that report no progress and the start of standby workers."""
PREPARE_TIMEOUT = 600.0
"""Seconds to prepare; after that, a standby worker is stuck."""
MAX_LOST = 3
_FIRST_LOOK, _LONGEST_LOOK, _LONGEST_WHILE_ONE_PREPARES = 0.5, 60.0, 2.0
"""Seconds between looks at the folder while waiting; each doubles the previous one."""
_NICE = 10
"""Nice value that leaves about a tenth of a contended processor."""
_KILL_TIMEOUT = 1.0
"""Seconds to wait for a killed one to end. When the run ends, the reaper ends leftovers."""
_MAX_SCRIPT = 1024 * 1024


class _Standby:
    def __init__(self, place: int, context: PContext, now: float) -> None:
        self.place, self.context, self.since = place, context, now
        self.prepared = False
        self.pid = context.pids()[0]


class StandbyWorkers(Feature, Source):
    """The standby workers of one agent."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._group = self.workers.group
        self._count = self.workers.group.spec.features.recovery.standby
        """How many to keep."""
        self._waiting: list[_Standby] = []
        self._next = self._group.spec.local_world_size
        """The number of the next one in the folder: above the workers' numbers, and never reused."""
        self._lost = 0
        self._asked = False
        """Whether the script is known to support standby workers."""
        self._start_at = SYSTEM_CLOCK.monotonic() + START_AFTER
        self._pause = _FIRST_LOOK
        self._progress = False
        """Whether the current workers are known to have made progress."""
        self._told: set[str] = set()
        self._lowers_priority = _priority_can_be_restored()
        if why := self._obstacle():
            self._give_up(why)

    def sources(self) -> Iterable[Source]:
        return (self,)

    def processes(self) -> tuple[WaitingProcess, ...]:
        return tuple(WaitingProcess(standby.pid, standby.prepared) for standby in self._waiting)

    def holds_folder(self) -> bool:
        return bool(self._waiting)

    def _obstacle(self) -> str:
        spec = self._group.spec
        if not isinstance(spec.entrypoint, str):
            return "the workers are functions"
        if spec.virtual_local_rank:
            return "with --virtual-local-rank all workers have one local rank"
        if macros.substitute(spec.args, "0") != macros.substitute(spec.args, "1"):
            return "the script's arguments depend on the local rank"
        return ""

    # Interface to the loop

    def fds(self) -> list[int]:
        return [fd for standby in self._waiting for fd in standby.context.exit_fds() or ()]

    def wake_at(self) -> float:
        return self._start_at if self._one_prepares() or self._may_start() else math.inf

    def step(self) -> None:
        """Check the waiting standby workers, and start missing ones if due."""
        now = SYSTEM_CLOCK.monotonic()
        for standby in tuple(self._waiting):
            if (ended := standby.context.poll()) is not None:
                failure = ended.failures.get(0)
                self._lose(standby, "has ended" if failure is None else f"failed: {failure.text}")
            elif not standby.prepared and now >= standby.since + PREPARE_TIMEOUT:
                self._lose(standby, f"did not prepare its function within {PREPARE_TIMEOUT:.0f} s and was killed")
        if not self._progress and self.workers.folder.made():
            self._progress, self._start_at = True, now
        if now < self._start_at:
            return
        longest = _LONGEST_WHILE_ONE_PREPARES if self._one_prepares() else _LONGEST_LOOK
        self._start_at, self._pause = now + self._pause, min(2 * self._pause, longest)
        self._note_prepared()
        if self._may_start() and self._is_asked_for() and not self._preload_is_busy():
            self._start()

    def _preload(self) -> Any:
        """The preload feature; None if not enabled."""
        return self.agent.find("preload")

    def _preload_is_busy(self) -> bool:
        preload = self._preload()
        return preload is not None and preload.is_busy

    def _may_start(self) -> bool:
        """Whether one is missing while workers are running or this node waits for its first round."""
        runs = self._group.state is WorkerState.HEALTHY or self._group.placement is None
        return runs and len(self._waiting) < self._count and self._lost < MAX_LOST

    def _one_prepares(self) -> bool:
        return not all(standby.prepared for standby in self._waiting)

    def _note_prepared(self) -> None:
        if not self._one_prepares():
            return
        prepared = WorkerChannel(self._group.notices).prepared()
        for standby in self._waiting:
            if not standby.prepared and standby.place in prepared:
                standby.prepared = True
                log.warning("[%s] a standby worker is ready (process %d)", self._group.spec.role, standby.pid)

    def _is_asked_for(self) -> bool:
        if self._asked:
            return True
        if self._group.placement is None:
            self._asked = _text_prepares(self._group.spec.args)
            return self._asked
        self._asked = bool(WorkerChannel(self._group.notices).prepared())
        if not self._asked and self.workers.folder.made():
            why = "the script has no function of rallypoint.inprocess with `prepare`"
            self._tell(f"no standby worker was started: {why}; its imports are preloaded for restarted workers")
        return self._asked

    # Starting and ending

    def _start(self) -> None:
        spec, reaper = self._group.spec, self.workers.ensure_reaper()
        assert isinstance(spec.entrypoint, str)
        self._group.notices = self._group.notices or self.workers.folder.reset()
        if not self._group.notices:
            return
        env = {
            **self.workers.constant_environment(),
            NOTICES_VARIABLE: self._group.notices,
            STANDBY_VARIABLE: str(self._next),
            "TORCHELASTIC_RESTART_COUNT": "standby",  # the name of its log folder
        }
        options = self.workers.process_options()._replace(waits_for_place=True)
        args, logs = tuple(macros.substitute(spec.args, "0")), self.workers.logs_specs
        try:
            context = SubprocessContext("standby", spec.entrypoint, {0: args}, {0: env}, logs, None, reaper, options)
            context.envs[0]["TORCHELASTIC_RESTART_COUNT"] = str(self._group.restarts)
            self.workers.set_cleanup(reaper)
            context.start()
        except RallypointError as error:
            self._give_up(str(error))
            return
        self._name_early_readers()
        started = _Standby(self._next, context, SYSTEM_CLOCK.monotonic())
        self._next += 1
        self._waiting.append(started)
        self._start_at, self._pause = started.since + _FIRST_LOOK, 2 * _FIRST_LOOK
        if self._lowers_priority:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, started.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)

    def _lose(self, standby: _Standby, how: str) -> None:
        self._remove(standby)
        self._lost += 1
        then = "another one will be started" if self._lost < MAX_LOST else f"no more will be started after {MAX_LOST}"
        log.warning("[%s] the standby worker process %d %s; %s", self._group.spec.role, standby.pid, how, then)

    def _remove(self, standby: _Standby) -> None:
        self._waiting.remove(standby)
        self._end(standby.context.hand_over(0))
        WorkerChannel(self._group.notices).remove({standby.place})

    def _give_up(self, why: str) -> None:
        self._lost = MAX_LOST
        self._tell(f"standby workers are off: {why}")

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning("[%s] %s", self._group.spec.role, line)

    def _name_early_readers(self) -> None:
        """Log modules that read a rank before the standby worker has one: they keep that value."""
        preload = self._preload()
        for reader in () if preload is None else preload.early_readers:
            if reader not in self._told:
                self._told.add(reader)
                log.warning(
                    "[%s] a standby worker imports %s before it has a rank, so what the module reads at import can be "
                    "wrong; import it in the function, or remove --standby",
                    *(self._group.spec.role, reader),
                )

    def close(self) -> None:
        for standby in tuple(self._waiting):
            self._remove(standby)
        self.workers.folder.clear()

    # Next round

    def take_places(self, context: PContext) -> None:
        assert self._group.placement is not None
        free = [rank for rank in range(context.nprocs) if rank not in context.pids()]
        channel = WorkerChannel(self._group.notices)
        channel.remove(free)
        self._note_prepared()
        self._start_at, self._pause = SYSTEM_CLOCK.monotonic() + START_AFTER, _FIRST_LOOK
        self._progress = False
        for standby in sorted(self._waiting, key=lambda standby: not standby.prepared):
            if free and self._takes_place(standby, free[0], channel, context):
                rank = free.pop(0)
                log.warning(
                    "[%s] a standby worker is taking over as local rank %d (process %d)",
                    self._group.spec.role,
                    rank,
                    standby.pid,
                )

    def _takes_place(self, standby: _Standby, rank: int, channel: WorkerChannel, context: PContext) -> bool:
        seen = read_stat(standby.pid)
        if standby.context.poll() is not None or seen is None or seen.state in "Tt":
            return False  # if it has ended, `step` notices; if stopped, it may continue later
        if not channel.become(standby.place, rank):  # it is not ready yet
            return False
        assert self._group.placement is not None
        round_, held = self._group.placement.round, standby.context.hand_over(0)
        self._waiting.remove(standby)
        self._lost = 0
        if self._lowers_priority:
            with suppress(OSError):
                os.setpriority(os.PRIO_PGRP, standby.pid, os.getpriority(os.PRIO_PROCESS, 0))
        gone = dict.fromkeys(held.environment.keys() - context.envs[rank].keys())
        context.relabel(rank, held.output)
        if not channel.enter(rank, round_, {**gone, **context.envs[rank]}):
            self._end(held)
            return False
        if cpus := context.cpus()[rank]:
            _bind(standby.pid, cpus)
        self.workers.ensure_reaper().adopt(standby.pid)
        context.adopt(rank, held)
        return True

    def _end(self, held: HeldWorker) -> None:
        held.process.signal(SIGKILL)
        readable(held.process.fileno(), _KILL_TIMEOUT)
        self.workers.console.end([held.output])
        held.process.release()


def _priority_can_be_restored() -> bool:
    """Whether this process may restore a lowered priority. Tried on a temporary thread."""
    may = []

    def attempt() -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, own + 1)
            os.setpriority(os.PRIO_PROCESS, 0, own)
            may.append(True)

    thread = start_thread(attempt, "rallypoint-priority")
    if thread is not None:
        thread.join()
    return bool(may)


def _bind(pid: int, cpus: Collection[int]) -> None:
    """Bind all threads of a process to these processors, if the threads still exist."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cpus)


def _text_prepares(args: Collection[object]) -> bool:
    """Whether a word of the command is a script that uses `inprocess.resumable(prepare=...)`."""
    for word in map(str, args):
        if word.endswith(".py"):
            with suppress(OSError), open(word, "rb") as file:
                text = file.read(_MAX_SCRIPT)
                return b"inprocess" in text and b"prepare=" in text
    return False
