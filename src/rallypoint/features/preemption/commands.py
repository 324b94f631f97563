"""Commands of a scheduler: bounded in time, and not ended by the signals that it sends to all processes of a job."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

_KILLED = 1.0
"""Seconds that a command has to be gone after SIGKILL, which one that hangs in the kernel is not."""
_SENT_TO_ALL = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT}


class SchedulerCommand:
    """A command under way, which does not end by what a scheduler sends to all processes of its job.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)
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
