"""The user's own check of this node (`--node-check`): a command that runs before the node requests a place.

Laws:

1. Nothing here blocks: the loop sleeps on `fds` until `wake_at` and calls `step`, as when it stops workers.
2. Nothing is left behind: the command's child processes are ended, like leftovers of workers.
3. Its output is logged as it arrives; only the last part is kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from signal import SIGKILL, SIGTERM

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.sources import Gate
from rallypoint.agent.steps import NodeChecked, WorkersStopped
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import UserError
from rallypoint.base.kernel import until_readable
from rallypoint.base.log import get_logger, printable
from rallypoint.base.signals import how_it_ended
from rallypoint.failures.texts import truncate_line
from rallypoint.failures.tracebacks import clean_lines
from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import Stop, Sweep

log = get_logger(__name__)

_SHELL = "/bin/sh"
_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL when a check is stopped."""
_WARN_AFTER = 10.0
"""Seconds until a log line says that the check is still running; each interval doubles the previous one."""
_READ, _READS = 64 * 1024, 4
"""Bytes per read, and reads per step: a command that writes endlessly must not block the loop."""
_KEPT = 8 * 1024
"""Maximum size of the kept output, and of a line that is logged whole."""
_SHOWN_LINES, _SHOWN_WIDTH, _SHOWN_COMMAND = 3, 200, 200


class NodeChecks(Feature):
    """Checks this node before it requests a place, and again after its own workers fail."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._options = self.workers.group.spec.features.checks
        self.workers.gate = self._begin

    def _begin(self) -> NodeCheck:
        return NodeCheck(self._options.node_check, self._options.node_check_timeout, self.workers.ensure_reaper())


class NodeCheck(Gate):
    """One run of the check; creating the object starts it.

    Args:
        command: a shell command.
        timeout: seconds after which the check has failed.
        reaper: starts the command.
        clock: the clock for `wake_at`.

    Raises:
        ResourceError: this machine cannot run another process.
        ReaperLost: the reaper has ended.
    """

    def __init__(self, command: str, timeout: float, reaper: ReaperClient, clock: Clock = SYSTEM_CLOCK) -> None:
        self._command = truncate_line(printable(command, len(command)), _SHOWN_COMMAND)
        self._timeout = timeout
        self._clock = clock
        self._reaper = reaper
        self._tail = self._line = b""
        self._why = ""
        """Why the check failed, once known."""
        self._stopped = False
        self._process: WorkerProcess | None = None
        self._ending: Stop | None = None
        self._output = -1
        now = clock.monotonic()
        self._deadline = now + timeout
        self._warn_every, self._warn_at = _WARN_AFTER, now + _WARN_AFTER
        log.info("starting the node check %r", self._command)
        self._began = now
        self._start(command)

    def _start(self, command: str) -> None:
        self._output, writing = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.set_blocking(self._output, False)
            argv = [_SHELL, "-c", command]
            self._process = WorkerProcess(self._reaper, argv, os.environ, writing, writing, stdin=nothing)
        except UserError as error:  # no shell exists, or the command is too long
            self._why = f"could not be started: {error}"
        except BaseException:
            self._close_output()
            raise
        finally:
            os.close(writing)
            os.close(nothing)

    # Interface to the loop

    def fds(self) -> list[int]:
        """Descriptors that become readable when `step` has work."""
        if self._ending is not None:
            more = self._ending.fds()
        else:
            more = [] if self._process is None else [self._process.fileno()]
        return more if self._output < 0 else [self._output, *more]

    def wake_at(self) -> float:
        """When `step` must run next, in seconds on the clock."""
        if self._ending is not None:
            return self._ending.wake_at()
        return 0.0 if self._process is None else min(self._deadline, self._warn_at)

    def step(self) -> Iterator[NodeChecked | WorkersStopped]:
        """Do due work. Yields the result once the check finished and left no processes."""
        self._read(_READS)
        if self._process is not None:
            if self._ending is None:
                self._look(self._process)
            if self._ending is None or not self._ending.step():
                return
            self._read(_READS)  # no writer is left: read the rest of the pipe
            self._log_lines(b"\n" if self._line else b"")
            self._process.release()
        self._close_output()
        yield self._outcome()

    def begin_stop(self, number: int) -> None:
        """End the check with this signal. Its exit code then says nothing about the node."""
        self._stopped = True
        self._begin_end(number if number == SIGKILL else SIGTERM)  # a shell waiting for a command might ignore others

    def kill_now(self) -> None:
        """Send SIGKILL to all remaining processes."""
        if self._ending is not None:
            self._ending.kill_now()

    def end(self, number: int) -> None:
        """End the check with this signal, and return when no process is left."""
        self.begin_stop(number)
        while not any(self.step()):
            until_readable(self.fds(), self.wake_at() - self._clock.monotonic())

    def _outcome(self) -> NodeChecked | WorkersStopped:
        if self._stopped:
            return WorkersStopped(ended_in_order=True)
        if not self._why:
            log.info("the node check %r passed in %.1f s", self._command, self._clock.monotonic() - self._began)
            return NodeChecked()
        return NodeChecked(failure_sentence(self._command, self._why, self._tail))

    # Internals

    def _look(self, process: WorkerProcess) -> None:
        """Start to end the check once its command exits or its time is up."""
        now = self._clock.monotonic()
        code = process.poll()
        if code is not None:
            if process.orphaned:
                self._why = "was lost with the process that started it"
            elif code:
                self._why = how_it_ended(code)
            self._begin_end(SIGTERM)
        elif now >= self._deadline:
            self._why = f"did not end within {self._timeout:g} s (--node-check-timeout)"
            self._begin_end(SIGTERM)
        elif now >= self._warn_at:
            self._warn_every *= 2
            self._warn_at = now + self._warn_every
            took = now - self._began
            log.warning(
                "the node check %r has been running for %.0f s (limit: %g s)", self._command, took, self._timeout
            )

    def _begin_end(self, number: int) -> None:
        if self._process is not None and self._ending is None:
            sweep = Sweep(self._reaper, [self._process])
            self._ending = Stop({0: self._process}, sweep, number, _GRACE, clock=self._clock)

    def _read(self, reads: int) -> None:
        while self._output >= 0 and reads:
            reads -= 1
            try:
                chunk = os.read(self._output, _READ)
            except BlockingIOError:
                return
            if not chunk:
                self._close_output()
                return
            self._tail = (self._tail + chunk)[-_KEPT:]
            self._log_lines(chunk)

    def _log_lines(self, chunk: bytes) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        *lines, self._line = (self._line + chunk).split(b"\n")
        if len(self._line) > _KEPT:
            lines, self._line = [*lines, self._line], b""
        for line in lines:
            for text in clean_lines(line[:_KEPT]):
                log.info("[node check] %s", printable(text, _KEPT))

    def _close_output(self) -> None:
        fd, self._output = self._output, -1
        if fd >= 0:
            os.close(fd)


def failure_sentence(command: str, why: str, output: bytes) -> str:
    """Describe a failed check in a sentence.

    Args:
        command: the command as shown.
        why: the reason.
        output: the last part of its output.
    """
    lines = [line for line in clean_lines(output) if line.strip()][-_SHOWN_LINES:]
    shown = " / ".join(truncate_line(printable(line.strip(), len(line)), _SHOWN_WIDTH) for line in lines)
    wrote = f"; its last output: {shown}" if shown else ""
    return f"this node will not join: the node check {command!r} {why}{wrote}; fix the node, then restart its agent"
