"""Out of memory: the report names the kernel's out-of-memory killer, and only when it was the cause."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import rallyrun
from tests.jobs.launching import RALLYRUN, Job, Launcher

__all__ = ["rallyrun"]

LIMIT = 160 << 20
_FIRST = {"memory.limit_in_bytes": LIMIT, "memory.memsw.limit_in_bytes": LIMIT}
_SECOND = {"memory.max": LIMIT, "memory.swap.max": 0}
KILLER = "killed by the kernel's out-of-memory killer"
DEVOUR = """
held = []
while True:
    held.append(b"x" * (4 << 20))
"""
"""Swap does not help for long: what is written stays in use."""


class Group:
    """A control group of the test's own with little memory.

    Args:
        top: the folder that it is made in.
        second: whether groups are of the second version.
    """

    def __init__(self, top: Path, second: bool) -> None:
        self.folder = top / f"rallypoint-test-{uuid.uuid4().hex[:12]}"
        self.folder.mkdir()
        limits = _SECOND if second else _FIRST
        try:
            for name, limit in limits.items():
                if "sw" not in name or (self.folder / name).exists():  # the kernel may be one without swap
                    (self.folder / name).write_text(str(limit))
        except OSError:
            self.folder.rmdir()
            raise

    @property
    def entry(self) -> list[str]:
        """What a command line begins with to run in this group; the process stays the same."""
        return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(self.folder)]

    def remove(self) -> None:
        """Take it away; nothing may run in it."""
        deadline = time.monotonic() + 60
        while (left := (self.folder / "cgroup.procs").read_text()) and time.monotonic() < deadline:
            threading.Event().wait(0.05)  # who has just ended may still be in it
        assert not left, f"processes were left in the control group: {left.split()}"
        self.folder.rmdir()


def _made() -> Group:
    """A group, of whichever version counts memory here.

    Raises:
        OSError: there can be none.
    """
    first = Path("/sys/fs/cgroup/memory")
    return Group(first, second=False) if first.is_dir() else Group(Path("/sys/fs/cgroup"), second=True)


@pytest.fixture
def group(rallyrun: Launcher) -> Iterator[Group]:
    try:
        made = _made()
    except OSError as error:
        pytest.skip(f"FAULT TESTS DID NOT RUN: no control group with a limit of memory can be made here: {error}")
    yield made
    for job in rallyrun.jobs:
        job.stop()
    made.remove()


def _fails_in(group: Group, rallyrun: Launcher, text: str, *flags: str) -> str:
    """The root cause that the report of a job in this group names."""
    job: Job = rallyrun.command([*group.entry, *RALLYRUN, "--standalone", *flags, rallyrun.script(text)])
    assert job.ends() == 1, job.err
    return job.err[job.err.index("Root Cause") :]


def _log_is_readable() -> bool:
    """Whether the kernel's log tells us for certain, as it does root outside of containers."""
    from rallypoint.failures.failure import killed_for_memory

    return killed_for_memory() is not None


def test_a_worker_that_takes_too_much_is_told_apart_from_one_that_was_killed(group: Group, rallyrun: Launcher) -> None:
    text = f'import os, time\nif os.environ["RANK"] == "0":\n    time.sleep(600)\n{DEVOUR}'
    root = _fails_in(group, rallyrun, text, "--nproc-per-node=2")
    assert "rank      : 1 (local_rank: 1)" in root
    assert f"{KILLER} (it held " in root or not _log_is_readable()
    assert KILLER in root
    assert f"/{group.folder.name}: oom_kill rose from 0 to 1, limit 160 MB" in root
    assert "Signal 9 (SIGKILL) received by PID " in root


def test_a_restart_counts_from_its_own_start(group: Group, rallyrun: Launcher) -> None:
    end = 'import os\nif os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":\n    os.kill(os.getpid(), 9)\n'
    root = _fails_in(group, rallyrun, end + DEVOUR, "--max-restarts=1")
    assert "Signal 9 (SIGKILL) received by PID " in root
    assert KILLER not in root
    assert KILLER in rallyrun.jobs[0].err, "the restart's reason is told when it comes"
