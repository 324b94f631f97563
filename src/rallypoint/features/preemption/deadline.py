"""Finds and reports the end of the job's time limit.

Only newer versions of Slurm set `SLURM_JOB_END_TIME`; no other scheduler sets such a variable. So the agent asks the
scheduler (`limits`) once the job is running, and again before any action, since an operator might have extended the
time. The end is a wall-clock time, compared with this host's clock. Only the node with group rank 0 watches it; before
the first round, every node does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rallypoint.agent.sources import Source
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger, printable
from rallypoint.base.mailbox import Background
from rallypoint.features.preemption.commands import SchedulerCommand
from rallypoint.features.preemption.limits import moment, scheduler_of
from rallypoint.features.preemption.rules import PreemptionRequested

log = get_logger(__name__)

END_TIME = "SLURM_JOB_END_TIME"
_FIRST_ASKED = 3.0
"""Seconds after the start before the scheduler is first asked: by then there is a round, so only one node asks."""
_ANSWER_TIMEOUT = 10.0
_ANSWER_HOLDS = 60.0
"""Seconds for which an answer is valid."""
_LOOK_EVERY = 60.0
"""Seconds between looks at the wall clock, which can be changed."""
_INEXACT = 60.0
"""Seconds by which answers about the same end can differ: LSF counts minutes."""


def end_time(environ: Mapping[str, str], now: float) -> float | None:
    """Read the job's end from the environment, in epoch seconds; None if missing or impossible.

    Args:
        environ: this process's environment.
        now: the current time in epoch seconds.
    """
    return moment(environ.get(END_TIME, ""), now)


class JobDeadline(Source):
    """Waits until shortly before the job's end, and reports it once. A thread asks the scheduler, which might hang.

    Args:
        before_end: seconds before the job's end.
        notice: maps the remaining seconds to the workers' seconds.
        leads: returns whether this node watches the job's end.
        post: called with the event.
        environ: this process's environment.
        clock: the loop's clock.
        wall: returns epoch seconds.
    """

    def __init__(
        self,
        before_end: float,
        notice: Callable[[float], float],
        leads: Callable[[], bool],
        post: Callable[[PreemptionRequested], None],
        environ: Mapping[str, str],
        clock: Clock = SYSTEM_CLOCK,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._before_end = before_end
        self._notice = notice
        self._leads = leads
        self._post = post
        self._environ = environ
        self._clock = clock
        self._wall = wall
        self._scheduler = scheduler_of(environ)
        self._job = "" if self._scheduler is None else f"{self._scheduler.title} job {self._scheduler.job(environ)}"
        self._end = end_time(environ, wall())
        self._query: Background[list[str]] | None = None
        """Asks the scheduler; created with the first query."""
        self._command: SchedulerCommand | None = None
        """The running command, set by the thread."""
        self._asked_at = -math.inf
        self._ask_at = clock.monotonic() + _FIRST_ASKED
        self._over = False
        """Whether nothing is left to wait for."""
        if self._end is None and self._scheduler is None:
            self._unknown(f"{END_TIME} is not set, and this is not a job of Slurm, PBS, LSF or Flux")

    # A monitor of the agent's loop

    def fds(self) -> list[int]:
        return self._query.fds() if self._query is not None and self._query.busy else []

    def wake_at(self) -> float:
        if self._query is not None and self._query.busy:
            return self._asked_at + _ANSWER_TIMEOUT
        if self._over or not self._leads():
            return math.inf
        now = self._clock.monotonic()
        return self._ask_at if self._end is None else now + min(max(0.0, self._due_in()), _LOOK_EVERY)

    def step(self) -> None:
        now = self._clock.monotonic()
        if self._query is not None and self._query.busy:
            said = self._query.take_result()
            if said is None and now < self._asked_at + _ANSWER_TIMEOUT:
                return
            self._drop_query()
            self._take(said or ["it does not answer"])
        if self._over or not self._leads() or (self._end is None and now < self._ask_at):
            return
        if self._end is not None and self._due_in() > 0:
            return
        if self._scheduler is not None and now >= self._asked_at + _ANSWER_HOLDS:
            self._ask(now)
        elif self._end is not None:
            self._report(self._end - self._wall())

    def close(self) -> None:
        """Close at the end of the run."""
        self._over = True
        self._drop_query()
        if self._query is not None:
            self._query.close()
            self._query = None

    # Internals

    def _due_in(self) -> float:
        assert self._end is not None, "only a known end is waited for"
        return self._end - self._before_end - self._wall()

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._query = self._query or Background("rallypoint-job-end")
        if not self._query.start(self._ask_scheduler):
            log.warning("the end time of %s is unknown: this machine does not allow any more threads", self._job)

    def _ask_scheduler(self) -> list[str]:
        """Return the scheduler's answer, or a sentence about a failure. On a thread."""
        scheduler = self._scheduler
        assert scheduler is not None, "only a scheduler that is known is asked"
        words = scheduler.command(scheduler.job(self._environ))
        try:
            command = SchedulerCommand(words, {**self._environ, **scheduler.variables})
        except OSError as error:
            return [f"{words[0]} could not be started: {error.strerror}"]
        self._command = command
        if self._over:  # reported meanwhile
            command.kill()
        code, lines = command.answer(_ANSWER_TIMEOUT)
        return lines or [f"{words[0]} {'does not answer' if code is None else f'ended with {code}'}"]

    def _drop_query(self) -> None:
        """Drop the query, and end its command if it is still running."""
        if self._query is not None:
            self._query.forget()
        command, self._command = self._command, None
        if command is not None:
            command.kill()

    def _take(self, said: Sequence[str]) -> None:
        """Process the scheduler's output."""
        assert self._scheduler is not None, "only a scheduler that is known answers"
        end = self._scheduler.read(said, self._wall())
        if end == math.inf:
            self._over = True
            log.warning("%s has no time limit, so --stop-before-end has no effect", self._job)
        elif end is not None:
            if self._end is not None and end > self._end + _INEXACT:
                log.warning("%s was extended by %.0f s", self._job, end - self._end)
            self._end = end
        elif self._end is None:
            which = f"{END_TIME} is not set, and " if self._scheduler.title == "Slurm" else ""
            self._unknown(f"{which}{self._scheduler.title} cannot be queried: {printable(said[-1])}")

    def _unknown(self, why: str) -> None:
        self._over = True
        log.warning(
            "the end time of this job is unknown, so --stop-before-end has no effect: %s; use --preempt-signals with "
            "%s instead",
            why,
            "'sbatch --signal'" if self._scheduler is None else self._scheduler.instead,
        )

    def _report(self, left: float) -> None:
        self._over = True
        why = f"reports that {self._job or 'this job'} ends in {max(0.0, left):.0f} s"
        self._post(PreemptionRequested(self._notice(left), why))
