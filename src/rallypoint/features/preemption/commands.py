"""Runs a scheduler's commands with a time limit, immune to its signals to all processes of a job."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

_KILLED = 1.0
"""Seconds for a command to end after SIGKILL; a command that hangs in the kernel does not."""
_SENT_TO_ALL = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT}


class SchedulerCommand:
    """A running command, immune to a scheduler's signals to all processes of its job.

    Raises:
        OSError: the command cannot start.
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
        """Wait at most `seconds`, once. Returns the exit code, None if it had to be killed, and its output lines."""
        try:
            said, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_KILLED)
            return None, []
        return self._process.returncode, [line.strip() for line in said.strip().splitlines()]

    def kill(self) -> None:
        """Kill the command with its children. From any thread; a wait in `answer` ends at once."""
        if self._process.returncode is None:  # until then its pid cannot be reused
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
