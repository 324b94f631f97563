"""How long the workers have to end, also when a scheduler ends their node.

It gives a grace period of its own, then SIGKILL to all. Between SIGTERM and SIGKILL the workers may be given time to
save (`notice_timeout`), then they are stopped; the last `MARGIN` seconds belong to their stacks, to the sweep and to
the report. Where the value comes from:

    RALLYPOINT_TERMINATION_GRACE   seconds; it bounds notice and stop, whatever else was chosen
    Slurm                          KillWait of its slurm.conf, where that can be read, else 30, its default
    Kubernetes                     30, the default of terminationGracePeriodSeconds, which no pod can look up

What is only known or assumed of a scheduler shortens a `--shutdown-timeout` that nobody has chosen, and nothing else: a
signal may have been ordered long before the end (`sbatch --signal=TERM@300`), and who did that has chosen a time too.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping

from rallypoint.base.errors import UsageError
from rallypoint.base.light_typing import NamedTuple

VARIABLE = "RALLYPOINT_TERMINATION_GRACE"
MARGIN = 5.0
"""Seconds before SIGKILL at which the workers' time is over; half of the grace period if that is less."""

FAILURE_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL after a failure, by default (decision 26)."""

_DEFAULT = 30.0
"""Slurm's KillWait and Kubernetes' terminationGracePeriodSeconds, where nobody has set them."""
_SLURM_CONFS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Where slurm.conf lies if `SLURM_CONF` does not say: the usual place, and that of a node without one of its own."""


class TerminationGrace(NamedTuple):
    """Seconds from SIGTERM: `total` until the workers' time is over (infinite if not stated), `stop` for a stop."""

    total: float
    stop: float

    @property
    def notice(self) -> float:
        """How long the workers may save, so that there is time to stop them."""
        return self.total - min(self.stop, self.total / 2)

    def left(self, elapsed: float) -> float:
        """How long a stop may take that begins, or goes on, so many seconds after SIGTERM."""
        return max(0.0, min(self.stop, self.total - elapsed))


class GracePeriods:
    """How long the workers of one agent have to end.

    Args:
        stop: seconds between the signal that stops workers and SIGKILL.
        failure: the same where the round has ended by a failure; None for 5, or `stop` if that is less.
        chosen: whether somebody has chosen `stop`; if not, what is known of the scheduler's may shorten it.
    """

    def __init__(self, stop: float = 30, failure: float | None = None, chosen: bool = True) -> None:
        self.stop = stop
        self._failure = failure
        self._chosen = chosen
        self._times: TerminationGrace | None = None
        """What SIGTERM to this agent leaves of time, once it has come, at this moment of `time.monotonic`:"""
        self._terminated_at = 0.0

    def terminated(self) -> float | None:
        """This agent was sent SIGTERM: what the scheduler's grace period leaves counts from the first one on.

        Returns:
            The first time, until when a stop that is under way may take, on the monotonic clock.
        """
        if self._times is not None:
            return None
        self._terminated_at = time.monotonic()
        self._times = termination_grace(self.stop, chosen=self._chosen, environ=os.environ)
        return self._terminated_at + self.within(math.inf)

    @property
    def notice(self) -> float:
        """Seconds that the workers may be given to save before they are stopped; infinite before SIGTERM."""
        return math.inf if self._times is None else self._times.notice

    def of(self, failed: bool) -> float:
        """Seconds for a stop that begins now, after a failure or not."""
        if not failed:
            return self.within(self.stop)
        return self.within(min(FAILURE_GRACE, self.stop) if self._failure is None else self._failure)

    def within(self, seconds: float) -> float:
        """So many seconds, or what is left where this agent was sent SIGTERM."""
        if self._times is None:
            return seconds
        return min(seconds, self._times.left(time.monotonic() - self._terminated_at))


def termination_grace(shutdown_timeout: float, *, chosen: bool, environ: Mapping[str, str]) -> TerminationGrace:
    """What follows from what is known.

    Args:
        shutdown_timeout: seconds that a stop takes otherwise.
        chosen: whether somebody has chosen these.
        environ: of the agent.

    Raises:
        UsageError: see `stated_grace_period`.
    """
    grace = stated_grace_period(environ)
    if grace is not None:
        total = grace - min(MARGIN, grace / 2)
        return TerminationGrace(total, min(shutdown_timeout, total))
    assumed = None if chosen else scheduler_grace_period(environ)
    if assumed is None:
        return TerminationGrace(math.inf, shutdown_timeout)
    return TerminationGrace(math.inf, min(shutdown_timeout, assumed - min(MARGIN, assumed / 2)))


def stated_grace_period(environ: Mapping[str, str]) -> float | None:
    """What the user states; None if nothing.

    Raises:
        UsageError: it is no number of seconds above 0.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{VARIABLE}={text!r} is no number of seconds above 0; set one, or unset it")
    return seconds


def scheduler_grace_period(environ: Mapping[str, str]) -> float | None:
    """What is known or assumed of the scheduler that has started this process; None without one."""
    if environ.get("SLURM_JOB_ID"):
        return _slurm_kill_wait(environ)
    return _DEFAULT if environ.get("KUBERNETES_SERVICE_HOST") else None


def _slurm_kill_wait(environ: Mapping[str, str]) -> float:
    for path in filter(None, (environ.get("SLURM_CONF"), *_SLURM_CONFS)):
        try:
            with open(path, encoding="utf-8", errors="replace") as lines:
                return kill_wait(lines)
        except OSError:
            continue
    return _DEFAULT


def kill_wait(lines: Iterable[str]) -> float:
    """`KillWait` of the lines of a slurm.conf, in seconds; Slurm's default if there is none."""
    for line in lines:
        name, _, value = line.partition("#")[0].partition("=")
        if name.strip().lower() == "killwait" and value.strip().isdecimal():
            return max(1.0, float(value))
    return _DEFAULT
