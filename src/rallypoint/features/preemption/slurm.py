"""What Slurm says of a job, and what it is asked for: the end of the job's time, and its requeue.

Slurm says when the job ends in `SLURM_JOB_END_TIME`, which older versions do not set; else `squeue` is asked once the
job runs, and in any case again before anything is done, as an operator may have given the job more time. It is a moment
on the clock of the wall, and compared with this host's. Only one node looks at it: that of group rank 0, or each as
long as no round has begun.

The job is put into the queue again by the one node that the verdict names, beside the stop of its workers. Once it is
requeued, Slurm ends the job's step; and `srun --kill-on-bad-exit` does so when the first of the other nodes has ended
with the code of a preempted job. So the request must not die of the SIGTERM that all processes of the step are sent
then: it is blocked in `scontrol`, and the agent passes nothing on to it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rallypoint.agent.sources import Source
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.base.mailbox import Background
from rallypoint.base.signals import how_it_ended
from rallypoint.features.preemption.rules import PreemptionRequested

log = get_logger(__name__)

# The end of the job's time


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


class JobDeadline(Source):
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
            self._unknown(f"{END_TIME} is not set, and this is not a Slurm job (SLURM_JOB_ID is not set)")

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
        if not self._query.start(self._ask_slurm):
            log.warning("squeue was not asked for the job's end: this machine allows no further thread")

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
        why = f"reports that {job} ends in {max(0.0, left):.0f} s"
        self._post(PreemptionRequested(self._notice(left), why))


# The requeue


_REQUEUE_TIMEOUT = 20.0
"""Seconds that `scontrol` may take, beside the stop of the workers; it takes a hundredth of one, unless the controller
of the cluster is away."""
REQUEST = """case "$(squeue --noheader --jobs="$1" --format=%T 2>/dev/null)" in
COMPLETING*) echo "it is ending already, cancelled or requeued by somebody else"; exit 1 ;;
esac
exec scontrol requeue "$1"
"""
"""`scontrol` would bring back a job that was cancelled a moment ago."""


def times_requeued(environ: Mapping[str, str]) -> int:
    """How often Slurm has started the job again, for whatever reason."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() and text.isascii() else 0


class SlurmRequeue:
    """One request to Slurm, which is under way from the beginning. Nothing waits but `finish`.

    Args:
        limit: how often the job may be requeued.
        environ: of this process, by which the job is known.
    """

    def __init__(self, limit: int, environ: Mapping[str, str]) -> None:
        self._job = job_name(environ)
        self._request: SlurmCommand | None = None
        used = times_requeued(environ)
        self._count = f"{used + 1} of {limit}"
        self._failure = ""
        if used >= limit:
            self._failure = f"Slurm job {self._job} is not requeued: --requeue={limit} allows that no more often"
            return
        log.warning("requeueing Slurm job %s (%s)", self._job, self._count)
        try:
            self._request = SlurmCommand(["sh", "-c", REQUEST, "sh", self._job], os.environ)
        except OSError as error:
            self._failed(f"it could not be asked for: {error.strerror}")

    def finish(self) -> str:
        """Wait for the answer, and say in words what it is."""
        request, self._request = self._request, None
        if request is not None:
            code, lines = request.answer(_REQUEUE_TIMEOUT)
            if code is None:
                self._failed(f"scontrol did not answer within {_REQUEUE_TIMEOUT:g} s")
            elif code:
                self._failed((lines or [f"it {how_it_ended(code)}"])[-1])
        return self._failure or f"Slurm job {self._job} is requeued ({self._count})"

    def _failed(self, why: str) -> None:
        self._failure = f"Slurm job {self._job} is not requeued: {why}; run 'scontrol requeue {self._job}' yourself"


# Slurm's commands


_KILLED = 1.0
"""Seconds that a command has to be gone after SIGKILL, which one that hangs in the kernel is not."""
_SENT_TO_STEP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT}


def job_name(environ: Mapping[str, str]) -> str:
    """What Slurm's commands call the job of this process: its number, or array and task; empty if there is none.

    The number of a task may be that of its whole array.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


class SlurmCommand:
    """A command under way, which what Slurm sends to all processes of the job's step does not end.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_STEP)
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def answer(self, seconds: float = 0.0) -> tuple[int | None, list[str]]:
        """Wait for so long at most, once. Returns its exit code, None if it had to be ended, and the lines it wrote."""
        try:
            said, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_KILLED)
            return None, []
        return self._process.returncode, [line.strip() for line in said.strip().splitlines()]

    def kill(self) -> None:
        """Kill it, with what it has started. From any thread; who waits in `answer` has it at once."""
        if self._process.returncode is None:  # until then its pid is no other process's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
