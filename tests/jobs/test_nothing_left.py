"""Processes that workers spawned, however they detached, end with the job, whoever ended it.

The descendants have an empty environment, so the launcher's mark does not find them. The test knows them by their pids,
and each holds the writing end of a pipe that reads as ended when the last of them has ended.
"""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tests.jobs.launching import AtOnce, Launcher
from tests.unit.workers.test_process import parent_of

SPAWNING = """
import os, signal, subprocess, sys, time
rank, fifo = os.environ["RANK"], os.open("fifo", os.O_WRONLY)
def tell(*words):  # in one write, so that the lines of two workers do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def spawn(text, **more):
    return subprocess.Popen(["sh", "-c", text], pass_fds=[fifo], **more)
if rank == "0":
    spawn("sleep 600")
    spawn("sleep 600 & sleep 600", start_new_session=True)
    spawn("env -i setsid sh -c 'setsid sleep 600 & exec sleep 600' & exit 0", env={}).wait()
    spawn("kill -STOP $$; sleep 600")
tell("up", rank, os.getpid(), os.getppid())
"""

AT_ONCE = 8.0
"""Seconds: less than the ten that reaper and supervisor stay for what does not end; far more than they need."""
BOTH_UP = re.compile(r"up (\d) (\d+) (\d+)")


class Family:
    """A job whose rank 0 has spawned all kinds of descendants."""

    def __init__(self, rallyrun: Launcher, ending: str, *flags: str) -> None:
        fifo = rallyrun.folder / "fifo"
        os.mkfifo(fifo)
        self._reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.job = rallyrun("--standalone", "--nproc-per-node=2", *flags, rallyrun.script(SPAWNING + ending))
        self.folder = rallyrun.folder

    def up(self, count: int = 2) -> dict[int, tuple[int, int]]:
        """Wait for `count` workers; the last pid and parent's pid by rank."""
        lines = self.job.until(lambda lines: sum(line.startswith("up") for line in lines) >= count, f"{count} are up")
        found = [match for line in lines if (match := BOTH_UP.fullmatch(line))]
        return {int(match[1]): (int(match[2]), int(match[3])) for match in found}

    def go(self) -> None:
        """Let the workers go on."""
        (self.folder / "now").touch()

    def gone(self, seconds: float) -> bool:
        """Whether all descendants are gone within this time."""
        if not select.select([self._reading], [], [], seconds)[0]:
            return False
        assert os.read(self._reading, 64) == b"", "nobody writes"
        return True

    def close(self) -> None:
        os.close(self._reading)


@contextmanager
def family(rallyrun: Launcher, ending: str, *flags: str) -> Iterator[Family]:
    found = Family(rallyrun, ending, *flags)
    try:
        yield found
    finally:
        found.job.stop()
        assert found.gone(AT_ONCE), "descendants were left"
        found.close()


UNTIL_NOW = "\nwhile not os.path.exists('now'): time.sleep(0.01)\n"


def test_the_agents_own_sigkill_takes_all_down_at_once(rallyrun: Launcher) -> None:
    with family(rallyrun, "\nsignal.pause()") as found:
        workers = found.up()
        assert list((rallyrun.folder / "tmp").iterdir()), "there are temporary folders of the run"
        found.job.signal(signal.SIGKILL)
        assert found.gone(AT_ONCE)
        reaper = workers[0][1]
        rallyrun.until_gone(reaper)
        assert not rallyrun.left_files()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (UNTIL_NOW, 0),
        (UNTIL_NOW + "os.kill(os.getpid(), 9) if rank == '0' else signal.pause()", 1),
        ("\nif rank == '1': time.sleep(0.1)" + UNTIL_NOW + "sys.exit(rank == '1')", 1),
    ],
    ids=["success", "killed", "failure of a peer"],
)
def test_nothing_is_left_after(rallyrun: Launcher, ending: str, code: int) -> None:
    with family(rallyrun, ending) as found:
        found.up()
        found.go()
        assert found.job.ends() == code, found.job.err
        assert found.gone(AT_ONCE)


def test_nothing_is_left_after_a_signal(rallyrun: Launcher) -> None:
    with family(rallyrun, "\nsignal.pause()") as found:
        found.up()
        found.job.signal(signal.SIGTERM)
        found.job.ends()
        assert found.gone(AT_ONCE)


def test_what_a_leader_left_goes_when_the_others_have_ended(rallyrun: Launcher) -> None:
    with family(rallyrun, "\nif rank == '0': sys.exit(0)" + UNTIL_NOW) as found:
        workers = found.up()
        rallyrun.until_gone(workers[0][0])
        assert not found.gone(0.1), "the job goes on, and so do they"
        found.go()
        assert found.job.ends() == 0, found.job.err
        assert found.gone(AT_ONCE)


@pytest.mark.parametrize(("whom", "restarts"), [("reaper", 0), ("supervisor", 1)])
def test_the_loss_of_the_reaper_is_a_failure_that_is_told(rallyrun: Launcher, restarts: int, whom: str) -> None:
    script = rallyrun.script(
        "import os, signal, subprocess\nsubprocess.Popen(['setsid', 'sleep', '600'])\n"
        "os.write(1, f'up {os.environ[\"RANK\"]} {os.getpid()} {os.getppid()}\\n'.encode())\n"
        "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and signal.pause()\n"
    )
    job = rallyrun("--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", script)
    lines = job.until(lambda lines: len(lines) == 2, "two are up")
    reaper = int(lines[0].split()[3])
    supervisor = parent_of(reaper)
    os.kill(reaper if whom == "reaper" else supervisor, signal.SIGKILL)
    assert job.ends() == 1 - restarts, job.err
    assert f"the reaper (process {supervisor})" in job.err
    assert "killed by SIGKILL" in job.err
    if not restarts:
        assert "exitcode  : -9 " in job.err
    assert len(job.out) == 2 + 2 * restarts
    assert not rallyrun.left()


KILLING = """
import os, signal, sys
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
if os.environ["RANK"] == "0":
    os.kill(parent(parent(os.getppid())), signal.SIGKILL)
signal.pause()
"""


def test_an_agent_that_is_killed_while_it_starts_its_workers_leaves_no_folder(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--nproc-per-node=64", rallyrun.script(KILLING))
    assert job.ends() == -signal.SIGKILL


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def stubborn():
    os.write(1, b"up\\n")
    while True: signal.pause()
if os.environ["RANK"] == "1":
    os.write(1, b"up\\n")
    while not os.path.exists("now"): time.sleep(0.01)
    sys.exit(3)
stubborn()
"""


def test_whoever_asks_the_grace_is_kept_and_the_stack_is_shown(at_once: AtOnce) -> None:
    at_once(
        partial(the_grace_is_kept, who="SIGTERM", grace="--shutdown-timeout=1"),
        partial(the_grace_is_kept, who="a peer's failure", grace="--shutdown-timeout=1"),
        partial(the_grace_is_kept, who="a peer's failure", grace="--rdzv-conf=failure_grace=1"),
    )


def the_grace_is_kept(rallyrun: Launcher, *, who: str, grace: str) -> None:
    script = rallyrun.script(STUBBORN)
    nproc = 1 if who == "SIGTERM" else 2
    flags = ["--standalone", f"--nproc-per-node={nproc}", grace, script]
    job = rallyrun(*flags)
    job.until(lambda lines: lines == ["up"] * nproc, "all are up")
    if who == "SIGTERM":
        job.signal(signal.SIGTERM)
    else:
        (rallyrun.folder / "now").touch()
    assert job.ends() == 1
    assert "in stubborn" in job.err
    waited = re.search(r"did not end within ([0-9]+) s; sending SIGKILL", job.err)
    assert waited is not None
    assert 1 <= int(waited[1]) < 30, "the default"


def test_the_signal_goes_to_the_worker_alone(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        "import os, signal, subprocess, sys, time\n"
        # Its own child may be ended first.
        "text = 'trap \"echo heard; exit\" TERM; echo up; while :; do sleep 600 & wait; done'\n"
        "child = subprocess.Popen(['sh', '-c', text])\n"
        "def end(*_):\n"
        "    try:\n        child.wait(0.5)\n"
        "    except subprocess.TimeoutExpired:\n        os.write(1, b'saved\\n')\n"
        "    sys.exit()\n"
        "signal.signal(15, end)\nos.write(1, b'up\\n')\n"
        "while True: time.sleep(0.02)\n"  # a signal right before a pause would not end it
    )
    job = rallyrun("--standalone", script)
    job.until(lambda lines: lines.count("up") == 2, "worker and child are up")
    job.signal(signal.SIGTERM)
    job.ends()
    assert job.out == ["up", "up", "saved", "heard"], "what it has started is asked when it is gone"


def test_many_workers_start_and_stop_quickly(rallyrun: Launcher) -> None:
    waits = ["--no-python", "sh", "-c", "echo up; sleep 600 & wait"]
    job = rallyrun("--standalone", "--nproc-per-node=64", "--shutdown-timeout=90", *waits)
    job.until(lambda lines: lines == ["up"] * 64, "all are up")
    job.signal(signal.SIGTERM)
    job.ends()
    assert "did not end within" not in job.err, "none has waited for SIGKILL"
    assert not rallyrun.left()
