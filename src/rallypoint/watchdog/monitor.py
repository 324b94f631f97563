"""What an agent watches of its workers besides their exits: timers, and uninterruptible sleep; see `monitor_for`.

Laws:

1. Nothing is enforced before `watch` and after `stop_enforcing`; requests are read until `close`, so that a worker
   that is being stopped still finds its pipe.
2. `close` removes `files`.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Collection, Mapping

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.watchdog.clients import is_descendant
from rallypoint.watchdog.uninterruptible import SleepMonitor, StuckProcess
from rallypoint.watchdog.watchdog import Report, Watchdog

log = get_logger(__name__)

ENABLE_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
UNINTERRUPTIBLE_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class WorkerMonitor:
    """Watches the workers of one start, from before they start until they have ended. Nothing here blocks.

    Args:
        path: of the watchdog's pipe; None for no watchdog.
        stuck_after: seconds in uninterruptible sleep that make a worker unhealthy; 0 or less to check nothing.
        run_id, grace, report, clock: see `Watchdog`.

    Raises:
        UserError: the pipe cannot be made; says why.
    """

    def __init__(
        self,
        path: str | None,
        stuck_after: float,
        *,
        run_id: str = "",
        grace: float = 30.0,
        report: Report | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._pids: Collection[int] = ()
        self._expiry_reasons: dict[int, str] = {}
        self._stuck: dict[int, StuckProcess] = {}
        self._stuck_watch = SleepMonitor(stuck_after) if stuck_after > 0 else None
        self._watchdog: Watchdog | None = None
        if path is not None:
            self._watchdog = Watchdog(
                path,
                lambda pid: is_descendant(pid, self._pids),
                run_id=run_id,
                grace=grace,
                report=report,
                clock=clock,
            )

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the environment of the workers."""
        return {} if self._watchdog is None else {FILE_VARIABLE: self._watchdog.path}

    @property
    def files(self) -> list[str]:
        """Files that `close` removes, and that the reaper should remove if this process is killed."""
        return [] if self._watchdog is None else [self._watchdog.path]

    def watch(self, pids: Collection[int]) -> None:
        """The workers have started."""
        self._pids = tuple(pids)

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        return [] if self._watchdog is None or not self._pids else self._watchdog.fds()

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the clock; infinite for never."""
        if not self._pids:
            return math.inf
        watched = (self._watchdog, self._stuck_watch)
        return min([each.wake_at() for each in watched if each is not None], default=math.inf)

    def step(self) -> None:
        """Do what is due. `expiry_reason` and `stuck` return the results."""
        if not self._pids:
            return
        if self._watchdog is not None:
            for expiry in self._watchdog.step():
                if expiry.signal > 0:
                    self._expiry_reasons.setdefault(expiry.pid, expiry.why)
        if self._stuck_watch is not None:
            for each in self._stuck_watch.step(self._clock.monotonic(), self._pids):
                self._stuck[each.pid] = each

    def expiry_reason(self, pid: int) -> str:
        """Why the watchdog ended a process, in a few words; empty if it did not."""
        return self._expiry_reasons.get(pid, "")

    @property
    def stuck(self) -> dict[int, StuckProcess]:
        """The workers that have been found stuck in the kernel, by pid."""
        return dict(self._stuck)

    def stop_enforcing(self) -> None:
        """The workers are being stopped: from now on nothing is enforced."""
        self._stuck_watch = None
        if self._watchdog is not None:
            self._watchdog.stop_enforcing()

    def close(self) -> None:
        """The workers have ended: remove the pipe. Idempotent."""
        self.stop_enforcing()
        self._pids = ()
        if self._watchdog is not None:
            self._watchdog.close()


def monitor_for(
    environment: Mapping[str, str],
    folder: str,
    *,
    stuck_after: float | None = None,
    run_id: str = "",
    grace: float = 30.0,
    report: Report | None = None,
) -> WorkerMonitor | None:
    """The monitor that an agent's environment asks for; None if it asks for none.

    Args:
        environment: the agent's own.
        folder: for temporary files.
        stuck_after: seconds in uninterruptible sleep that make a worker unhealthy; None takes the environment's.
        run_id, grace, report: see `WorkerMonitor`.

    Raises:
        UserError: the pipe cannot be made; says why.
    """
    path = None
    if environment.get(ENABLE_VARIABLE) == "1":
        path = environment.get(FILE_VARIABLE) or os.path.join(folder, f"watchdog_timer_{uuid.uuid4()}")
        log.info("Starting a FileTimerServer with %s ...", path)
    seconds = uninterruptible_timeout(environment) if stuck_after is None else stuck_after
    if path is None and seconds <= 0:
        return None
    return WorkerMonitor(path, seconds, run_id=run_id, grace=grace, report=report)


def uninterruptible_timeout(environment: Mapping[str, str]) -> float:
    """The variable's seconds in uninterruptible sleep that make a worker unhealthy; 0 for off, and for no number."""
    try:
        seconds = float(environment.get(UNINTERRUPTIBLE_VARIABLE, "0"))
    except ValueError:
        log.warning(
            "%s=%r is not a number of seconds; off", UNINTERRUPTIBLE_VARIABLE, environment[UNINTERRUPTIBLE_VARIABLE]
        )
        return 0.0
    return seconds if 0 < seconds < math.inf else 0.0
