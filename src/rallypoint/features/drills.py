"""Injects a drill's faults on this node (`rallyctl drill`). All other code detects them like real faults.

Laws:

1. Only this agent and its workers are affected, each identified by pid and start time. A killed worker counts as killed
   from outside.
2. A stopped agent could not continue anything, so a helper process continues or kills every stopped process when the
   time is up. If the agent ends earlier, the helper does so immediately.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from subprocess import DEVNULL, PIPE, Popen

from rallypoint.agent.feature import Agent, Feature
from rallypoint.base.light_typing import Any
from rallypoint.base.log import get_logger
from rallypoint.base.process_table import ProcessStat, read_stat, signal_process
from rallypoint.control.protocol.messages import Fault, FaultRequested, HangReport

log = get_logger(__name__)

_FREEZER = """
import select, signal, sys
folder, last, seconds, *targets = sys.argv[1:]
sys.path.append(folder)
from rallypoint.base.process_table import read_stat, signal_process
found = {target: read_stat(int(target.split(":")[0])) for target in targets}
def tell(number):
    for target, stat in found.items():
        if stat is not None and target == f"{stat.pid}:{stat.started}":
            signal_process(stat, number)
tell(signal.SIGSTOP)
select.select([0], [], [], float(seconds))
tell(int(last))
"""
"""Stops processes, identified by pid and start time. After some seconds, or at the end of its input, sends them a last
signal.
"""
_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class Drills(Feature):
    """The drills of one agent. Never blocks."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._freezers: list[Popen[bytes]] = []
        self._hang: Popen[bytes] | None = None

    def messages(self) -> Mapping[type, Callable[[Any], None]]:
        return {FaultRequested: self._begin, HangReport: self._end_hang}

    def close(self) -> None:
        for freezer in self._freezers:
            _release(freezer)
            freezer.wait()

    def _begin(self, request: FaultRequested) -> None:
        """Inject the requested fault. The link itself performs a cut."""
        self._freezers = [freezer for freezer in self._freezers if freezer.poll() is None]
        fault, workers = request.fault, self._targets(request)
        if fault.is_of_worker and not workers:
            log.warning("the drill has no effect: rank %d is not running here at the moment", request.rank)
            return
        try:
            self._do(request, workers)
        except OSError as error:  # the process has ended, or this machine has no process or descriptor left
            log.warning("the drill cannot be carried out: %s", error)

    def _do(self, request: FaultRequested, workers: list[ProcessStat]) -> None:
        match fault := request.fault:
            case Fault.KILL_WORKER:
                for worker in workers:
                    signal_process(worker, signal.SIGKILL)
            case Fault.KILL_AGENT:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.PAUSE_WORKER | Fault.HANG:
                if fault is Fault.HANG and not self.workers.group.spec.features.hangs.hang_timeout:
                    log.warning("this node was started without --hang-timeout, so nothing will detect this hang")
                freezer = self._freeze(workers, request.lasts)
                if fault is Fault.HANG:
                    self._hang = freezer
            case Fault.KILL_NODE | Fault.PAUSE_NODE:
                own = read_stat(os.getpid())
                assert own is not None
                self._freeze([*workers, own], request.lasts, kill=fault is Fault.KILL_NODE)

    def _end_hang(self, _report: HangReport) -> None:
        """Let the worker continue after its hang was reported, unless it is ended."""
        freezer, self._hang = self._hang, None
        if freezer is not None:
            _release(freezer)

    def _targets(self, request: FaultRequested) -> list[ProcessStat]:
        """The running workers to affect."""
        context = self.workers.pcontext
        if context is None:
            return []
        ranks = {worker.local_rank: worker.global_rank for worker in self.workers.group.workers}
        stats = {
            local: read_stat(pid)
            for local, pid in context.program_pids().items()
            if not request.fault.is_of_worker or ranks[local] == request.rank
        }
        # Check after reading: a worker that is still running had this pid.
        return [stat for local in context.running if (stat := stats.get(local)) is not None]

    def _freeze(self, targets: list[ProcessStat], seconds: float, *, kill: bool = False) -> Popen[bytes]:
        last = signal.SIGKILL if kill else signal.SIGCONT
        names = [f"{stat.pid}:{stat.started}" for stat in targets]
        words = [sys.executable, "-I", "-S", "-c", _FREEZER, _PACKAGES, f"{last:d}", f"{seconds:f}", *names]
        freezer = Popen(words, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
        self._freezers.append(freezer)
        return freezer


def _release(freezer: Popen[bytes]) -> None:
    assert freezer.stdin is not None
    freezer.stdin.close()
