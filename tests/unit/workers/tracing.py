"""A debugger, which learns of a worker's end before the parent does, and can hold it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

TRACEABLE = "import ctypes; ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_long(-1), 0, 0, 0)\n"
"""For the beginning of a worker: all processes of the same user may trace it."""

_TRACER = """
import ctypes, os, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, pid, 0, 0):  # PTRACE_SEIZE
    print(os.strerror(ctypes.get_errno()), flush=True)
    raise SystemExit
print("traces", flush=True)
while True:
    news = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    if news.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
        break
    _, status = os.waitpid(pid, 0)
    libc.ptrace(7, pid, 0, os.WSTOPSIG(status))  # PTRACE_CONT: hand the signal on
print("holds", flush=True)
sys.stdin.readline()
"""


class Tracer:
    """Holds a process beyond its end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def wait_until_held(self) -> None:
        """Wait until the process has ended."""
        assert self.read() == "holds"

    def let_go(self) -> None:
        self._process.communicate("\n", 30)


@contextmanager
def traced(pid: int) -> Iterator[Tracer]:
    """Trace a process, at most until the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", _TRACER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        tracer = Tracer(process)
        try:
            answer = tracer.read()
            if answer != "traces":
                pytest.skip(f"nobody may trace here: {answer}")
            yield tracer
        finally:
            if process.poll() is None:
                process.kill()
