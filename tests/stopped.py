"""Waiting for a stop: `kill` returns before all threads of the process have stopped, and until then they answer."""

from __future__ import annotations

import os


def until_stopped(pid: int) -> None:
    """Wait until no thread runs any more of a child that was sent SIGSTOP, or until it has ended."""
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
