"""Signals that an agent handles and forwards (contract section 5.6), and the time that workers have to end.

A scheduler sends SIGKILL to all processes after its own grace period. Between SIGTERM and SIGKILL the workers might get
time to save (`notice_timeout`); then they are stopped. The last `MARGIN` seconds are for stacks, the sweep and the
report. Sources of the grace period:

    RALLYPOINT_TERMINATION_GRACE   seconds; limits notice and stop, whatever else was chosen
    the scheduler                  what is known about it (`clusters.grace`)

A known or assumed value for a scheduler shortens only a default `--shutdown-timeout`. A user who requests a signal long
before the end (`sbatch --signal=TERM@300`) also sets a time.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import UsageError
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name, signal_number

log = get_logger(__name__)

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

FORWARDED_SIGNALS = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGIO}
)
"""Signals that inform workers and do not end them."""

SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF", "FLUX_JOB_ID": "Flux"}
"""Variables that identify schedulers whose signals are notices, sent to the agent or to all processes of a job."""
_SCHEDULER_NOTICE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def scheduler(environ: Mapping[str, str]) -> str | None:
    """Name the scheduler that started this process; None if its signals are not notices."""
    return next((name for variable, name in SCHEDULERS.items() if environ.get(variable)), None)


def handled_signals() -> list[int]:
    """The signals that this agent handles; the command line has already warned about unknown names.

    If this process was started with SIGHUP ignored (`nohup`), SIGHUP stays ignored, unless the user changed the list of
    signals. SIGINT and SIGQUIT are handled even then: shell scripts start all background processes with both ignored.
    Under a scheduler, the default includes SIGUSR1 and SIGUSR2, unless this process uses them for something else.
    """
    names = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS)
    numbers: list[int] = [number for number in map(signal_number, names.split(",")) if number is not None]
    if names != DEFAULT_SIGNALS:
        return numbers
    if scheduler(os.environ) is not None:
        numbers += [number for number in _SCHEDULER_NOTICE_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


# Grace periods

VARIABLE = "RALLYPOINT_TERMINATION_GRACE"
MARGIN = 5.0
"""Seconds before SIGKILL at which the workers' time ends; half of a grace period shorter than twice this."""

_HAS_GRACE_PERIOD = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID", "TRAINING_JOB_NAME")
"""Variables of schedulers whose grace period is known or assumed (`clusters.grace`)."""

FAILURE_GRACE = 5.0
"""Default number of seconds between SIGTERM and SIGKILL after a failure (decision 25)."""


class GracePeriods:
    """The grace periods of one agent's workers.

    Args:
        stop: seconds between the signal that stops workers and SIGKILL.
        failure: the same after a failure; None for 5, or `stop` if that is less.
        chosen: whether the user set `stop`; if not, the scheduler's grace period can shorten it.
    """

    def __init__(self, stop: float = 30, failure: float | None = None, chosen: bool = True) -> None:
        self.stop = stop
        self._failure = failure
        self._chosen = chosen
        self._terminated_at: float | None = None
        """When this agent first received SIGTERM, on `time.monotonic`; None before."""
        self._total = self._stop = math.inf
        """Seconds from that SIGTERM until the workers' time ends, and the maximum seconds for a stop."""

    def terminated(self) -> float | None:
        """Note a SIGTERM to this agent: the scheduler's grace period counts from the first one.

        Returns:
            On the first call, when a stop in progress must be complete, on the monotonic clock.
        """
        if self._terminated_at is not None:
            return None
        self._terminated_at = time.monotonic()
        self._total, self._stop = termination_grace(self.stop, chosen=self._chosen, environ=os.environ)
        return self._terminated_at + self.within(math.inf)

    @property
    def notice(self) -> float:
        """Seconds that workers can have to save while leaving time to stop them; infinite before SIGTERM."""
        return self._total - min(self._stop, self._total / 2) if self._total < math.inf else math.inf

    def seconds(self, *, failed: bool) -> float:
        """Seconds for a stop that begins now, after a failure or not."""
        if not failed:
            return self.within(self.stop)
        return self.within(min(FAILURE_GRACE, self.stop) if self._failure is None else self._failure)

    def within(self, seconds: float) -> float:
        """This many seconds, or what is left of them after SIGTERM to this agent."""
        if self._terminated_at is None:
            return seconds
        return max(0.0, min(seconds, self._stop, self._total - (time.monotonic() - self._terminated_at)))


def termination_grace(shutdown_timeout: float, *, chosen: bool, environ: Mapping[str, str]) -> tuple[float, float]:
    """Determine the grace period: the seconds from SIGTERM until the workers' time ends, infinite if unknown, and the
    maximum seconds for a stop.

    Args:
        shutdown_timeout: the maximum seconds for a stop otherwise.
        chosen: whether the user set `shutdown_timeout`.
        environ: the agent's environment.

    Raises:
        UsageError: see `stated_grace_period`.
    """
    grace = stated_grace_period(environ)
    if grace is not None:
        total = grace - min(MARGIN, grace / 2)
        return total, min(shutdown_timeout, total)
    if chosen or not any(environ.get(name) for name in _HAS_GRACE_PERIOD):
        return math.inf, shutdown_timeout
    from rallypoint.clusters.grace import scheduler_grace_period

    assumed = scheduler_grace_period(environ)
    return math.inf, min(shutdown_timeout, assumed - min(MARGIN, assumed / 2))


def stated_grace_period(environ: Mapping[str, str]) -> float | None:
    """Read the grace period that the user set in the environment; None if unset.

    Raises:
        UsageError: it is not a number of seconds above 0.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{VARIABLE}={text!r} is not a number of seconds above 0; correct it or unset it")
    return seconds


SETTLE_TIME = 0.2
"""Maximum seconds between a scheduler's signal to the first process of a job on this node and to the last."""
BURST = 1.0
"""Seconds within which repetitions of a signal to all processes count as one."""

_SENT_TO_ALL_MESSAGE = "%s was sent to all processes of this job on this node; the workers received it too"


class SignalForwarding:
    """Forwards one agent's signals to workers that did not receive them too. Nothing here waits.

    A scheduler signals either the agent alone or every process of a job on this node. That depends on the scheduler,
    its settings (Slurm: `ProctrackType`) and the command. The reaper can tell the difference: it is below the agent in
    its own session, like each worker, and records the signals that it receives. The workers received those too.

    Laws:

    1. A worker gets a signal either from the sender or from us, never from both.
    2. Under a known scheduler, the sender might not be done: a signal that has not reached the reaper is forwarded
       after `SETTLE_TIME` seconds. Elsewhere it is forwarded at once.
    3. Workers never get a signal that arrived before their start.
    4. Repetitions of a signal within `BURST` seconds after it reached all count as one, because schedulers repeat
       signals.

    A signal to the reaper alone would be misread; Rallypoint never sends one.

    Args:
        received: returns the signals that the reaper has received since the last call.
        send: sends a signal to each running worker.
        scheduled: whether a scheduler that might signal all processes of a job started this process.
        clock: the clock of `wake_at`.
    """

    def __init__(
        self,
        received: Callable[[], Collection[int]],
        send: Callable[[int], None],
        scheduled: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._reaper_signals = received
        self._send = send
        self._scheduled = scheduled
        self._clock = clock
        self._shared: dict[int, float] = {}
        """Maps each signal to the time at which the reaper was found to have received it."""
        self._due: dict[int, float] = {}
        """Maps each signal to the time at which to forward it, unless it reaches the reaper first."""

    def shared_signals(self) -> frozenset[int]:
        """Signals that all processes below this agent received a moment ago."""
        now = self._clock.monotonic()
        self._shared.update(dict.fromkeys(self._reaper_signals(), now))
        return frozenset(number for number, at in self._shared.items() if now - at <= BURST)

    def forward(self, number: int) -> bool:
        """Handle a signal intended for the workers.

        Returns:
            Whether it is handled: the workers received it, or `step` will send it. If not, send it now.
        """
        if number in self.shared_signals():
            log.info(_SENT_TO_ALL_MESSAGE, signal_name(number))
            self._due.pop(number, None)
            return True
        # Under a scheduler, send nothing at once:
        #   1. the scheduler signals the job's processes one after the other, this agent first;
        #   2. if we forwarded the signal now, the workers would get it from us and again from the scheduler;
        #   3. a worker that saves at the first SIGUSR1 and ends at the second would interrupt its own save.
        # After `SETTLE_TIME` the reaper shows whether all processes received it.
        if self._scheduled:
            self._due.setdefault(number, self._clock.monotonic() + SETTLE_TIME)
        return self._scheduled

    def reset(self) -> None:
        """Forget earlier signals: other workers are about to start."""
        # Law 3. Without it:
        #   1. SIGUSR1 arrives 0.1 s before a worker fails, and is due in another 0.1 s;
        #   2. the round ends, and the workers of the next one are started;
        #   3. the signal would reach them before Python has installed their handler, and end them.
        self._shared.clear()
        self._due.clear()

    def is_handled(self, number: int) -> bool:
        """Whether the workers received the signal, or `step` will send it."""
        return number in self._due or number in self.shared_signals()

    def fds(self) -> list[int]:
        return []

    def wake_at(self) -> float:
        return min(self._due.values(), default=math.inf)

    def step(self) -> None:
        now = self._clock.monotonic()
        due = [number for number, at in self._due.items() if at <= now]
        if not due:
            return
        reached = self.shared_signals()
        for number in due:
            del self._due[number]
            if number in reached:
                log.info(_SENT_TO_ALL_MESSAGE, signal_name(number))
            else:
                log.info("Sending the workers %s", signal_name(number))
                self._send(number)
