"""Handles of processes without pidfds; tests/jobs/test_denied.py runs jobs on a kernel that denies them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.kernel import readable
from rallypoint.base.process_table import ProcessStat, read_stat
from rallypoint.base.without_pidfds import CheckedHandle, exit_fd
from tests.processes import completed

pytestmark = pytest.mark.process
TIMEOUT = 30.0


@contextmanager
def handle_of(pid: int, stat: ProcessStat | None = None) -> Iterator[CheckedHandle]:
    handle = CheckedHandle(pid, exit_fd(pid), stat or read_stat(pid))
    try:
        yield handle
    finally:
        handle.close()


def test_the_end_of_a_child() -> None:
    with subprocess.Popen(["sleep", "600"]) as child, handle_of(child.pid) as handle:
        assert not readable(handle.fileno())
        assert handle.outlives_reaper()
        handle.send_signal(signal.SIGTERM)
        assert readable(handle.fileno(), TIMEOUT)
        assert not handle.outlives_reaper()
        assert os.waitpid(child.pid, 0) == (child.pid, signal.SIGTERM)
        child.returncode = -signal.SIGTERM


def test_the_end_of_another_process() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        with handle_of(int(parent.stdout.readline())) as handle:
            assert not readable(handle.fileno())
            handle.send_signal(signal.SIGKILL)
            assert readable(handle.fileno(), TIMEOUT)
            assert parent.wait() == 0
            with pytest.raises(ProcessLookupError):
                handle.send_signal(signal.SIGKILL)


def test_a_reused_pid_gets_no_signal() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        stat = read_stat(child.pid)
        assert stat is not None
        stat.started -= 1
        with handle_of(child.pid, stat) as handle, pytest.raises(ProcessLookupError):
            handle.send_signal(signal.SIGKILL)
        assert child.poll() is None
        child.kill()
    with pytest.raises(ProcessLookupError):
        exit_fd(child.pid)


def test_a_python_without_pidfds() -> None:
    text = "import posix; del posix.pidfd_open; from rallypoint.base.pidfds import HAS_PIDFDS; print(HAS_PIDFDS)"
    assert completed([sys.executable, "-c", text], check=True).stdout == "False\n"
