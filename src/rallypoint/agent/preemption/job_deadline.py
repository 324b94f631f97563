"""When Slurm will end this job, and so when its workers have to begin to save (`--stop-before-end`).

The variable `SLURM_JOB_END_TIME` says it, which older versions of Slurm do not set; else `squeue` is asked once the
job runs, and in any case again before anything is done, as an operator may have given the job more time. It is a moment
on the clock of the wall, and compared with this host's.

Only one node looks at it: that of group rank 0, or each as long as no round has begun.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rallypoint.agent.preemption.slurm_command import SlurmCommand, job_name
from rallypoint.agent.preparations.background import Background
from rallypoint.agent.steps import PreemptionRequested
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger

log = get_logger(__name__)

END_TIME = "SLURM_JOB_END_TIME"
_FIRST_ASKED = 3.0
"""Seconds after the start at which Slurm is asked first: by then there is a round, so that one node asks."""
_ANSWER_TIMEOUT = 10.0
_ANSWER_HOLDS = 60.0
"""Seconds for which an answer of Slurm's is good."""
_LOOK_EVERY = 60.0
"""Seconds between looks at the clock of the wall, which may be set."""
_LONGEST = 10 * 366 * 86400.0
"""Seconds from now beyond which no end of a job is believed."""


def end_time(environ: Mapping[str, str], now: float) -> float | None:
    """When the environment says that the job ends, in epoch seconds; None if it does not, or what cannot be.

    Args:
        environ: of this process.
        now: the epoch seconds at this moment.
    """
    return _moment(environ.get(END_TIME, ""), now)


def _moment(text: str, now: float) -> float | None:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        return None
    return float(text) if abs(float(text) - now) < _LONGEST else None


class JobDeadline:
    """Waits for the moment, and reports it once. Nothing here blocks: a thread asks Slurm, as `squeue` may hang.

    Args:
        before_end: seconds before the job's end.
        notice: how many seconds workers have when so many are left.
        leads: whether this node is the one that looks.
        post: takes the event.
        environ: of this process.
        clock: of the loop.
        wall: gives epoch seconds.
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
        self._job = job_name(environ)
        self._end = end_time(environ, wall())
        self._query: Background[list[str]] | None = None
        """Asks Slurm; made with the first question."""
        self._squeue: SlurmCommand | None = None
        """The command under way, which the thread sets."""
        self._asked_at = -math.inf
        self._ask_at = clock.monotonic() + _FIRST_ASKED
        self._over = False
        """Whether there is nothing more to wait for."""
        if self._end is None and not self._job:
            self._unknown(f"{END_TIME} is not set, and this is no Slurm job (SLURM_JOB_ID is not set)")

    # A monitor of the agent's loop

    def fds(self) -> list[int]:
        """Readable when Slurm has answered."""
        return self._query.fds() if self._query is not None and self._query.busy else []

    def wake_at(self) -> float:
        """When there is something to do, on the clock."""
        if self._query is not None and self._query.busy:
            return self._asked_at + _ANSWER_TIMEOUT
        if self._over or not self._leads():
            return math.inf
        now = self._clock.monotonic()
        return self._ask_at if self._end is None else now + min(max(0.0, self._due_in()), _LOOK_EVERY)

    def step(self) -> None:
        """Ask, take the answer, or report that the moment has come."""
        now = self._clock.monotonic()
        if self._query is not None and self._query.busy:
            said = self._query.take()
            if said is None and now < self._asked_at + _ANSWER_TIMEOUT:
                return
            self._drop_query()
            self._take(said or ["squeue does not answer"])
        if self._over or not self._leads() or (self._end is None and now < self._ask_at):
            return
        if self._end is not None and self._due_in() > 0:
            return
        if self._job and now >= self._asked_at + _ANSWER_HOLDS:
            self._ask(now)
        elif self._end is not None:
            self._report(self._end - self._wall())

    def close(self) -> None:
        """The run is over."""
        self._over = True
        self._drop_query()
        if self._query is not None:
            self._query.close()
            self._query = None

    # Inside

    def _due_in(self) -> float:
        assert self._end is not None, "only a known end is waited for"
        return self._end - self._before_end - self._wall()

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._query = self._query or Background("rallypoint-squeue")
        self._query.start(self._ask_slurm)

    def _ask_slurm(self) -> list[str]:
        """What Slurm says, or a sentence. On a thread."""
        try:
            command = ["squeue", "--noheader", f"--jobs={self._job}", "--format=%e"]
            squeue = SlurmCommand(command, {**self._environ, "SLURM_TIME_FORMAT": "%s"})
        except OSError as error:
            return [f"squeue could not be started: {error.strerror}"]
        self._squeue = squeue
        if self._over:  # said meanwhile
            squeue.kill()
        code, lines = squeue.answer(_ANSWER_TIMEOUT)
        return lines or [f"squeue {'does not answer' if code is None else f'ended with {code}'}"]

    def _drop_query(self) -> None:
        """Drop the question, and end the command if it is still under way."""
        if self._query is not None:
            self._query.forget()
        squeue, self._squeue = self._squeue, None
        if squeue is not None:
            squeue.kill()

    def _take(self, said: Sequence[str]) -> None:
        """The lines that Slurm has said, of which the first that is a moment counts."""
        now = self._wall()
        moments = [moment for line in said if (moment := _moment(line, now)) is not None]
        if moments:
            if self._end is not None and moments[0] > self._end:
                log.warning("Slurm job %s has %.0f s more than it had", self._job, moments[0] - self._end)
            self._end = moments[0]
        elif said[-1] == "NONE":
            self._over = True
            log.warning("Slurm job %s has no time limit, so that --stop-before-end does nothing", self._job)
        elif self._end is None:
            self._unknown(f"{END_TIME} is not set, and Slurm cannot be asked: {said[-1]}")

    def _unknown(self, why: str) -> None:
        self._over = True
        log.warning(
            "when this job ends is not known, so that --stop-before-end does nothing: %s; use --preempt-signals with "
            "'sbatch --signal' instead",
            why,
        )

    def _report(self, left: float) -> None:
        self._over = True
        job = f"Slurm job {self._job}" if self._job else "this job"
        why = f"found that the time of {job} is over in {max(0.0, left):.0f} s"
        self._post(PreemptionRequested(self._notice(left), why))
