"""The agent waits for a worker's leftover processes while they are active, and names those that it ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.jobs.launching import Launcher

EXPORTER = """
import os, sys
trace = open("trace.json", "w")
trace.write("[")
os.write(1, b"exports\\n")
open("go").read()  # until the test lets it go on
trace.write("]")
trace.close()
"""
LEAVES = """
import os, subprocess, sys
read, write = os.pipe()
exporter = subprocess.Popen([sys.executable, "exporter.py"], stdout=write, start_new_session=True)
os.read(read, 8)
print("left", exporter.pid, os.getpid(), flush=True)
"""
ALL = "--leftover-timeout=60"
LEFT = re.compile(r"left (\d+)(?: (\d+))?")


class Exporting:
    """A job whose rank 0 leaves an exporter, which goes on when it is told to."""

    def __init__(self, rallyrun: Launcher, *flags: str, more: str = "") -> None:
        folder = rallyrun.folder
        (folder / "exporter.py").write_text(EXPORTER)
        os.mkfifo(folder / "go")
        os.mkfifo(folder / "fail")
        self._go, self._fail = (os.open(folder / name, os.O_RDWR) for name in ("go", "fail"))
        self.trace = folder / "trace.json"
        self.job = rallyrun("--standalone", "--nproc-per-node=2", *flags, rallyrun.script(more + LEAVES))

    def pid(self) -> int:
        """The exporter's, once the worker that has left it is gone."""
        lines = self.job.until(lambda lines: any(map(LEFT.fullmatch, lines)), "the exporter is left")
        match = next(match for match in map(LEFT.fullmatch, lines) if match)
        Launcher.until_gone(int(match[2]))
        return int(match[1])

    def go(self) -> None:
        self._close("_go")

    def fail(self) -> None:
        self._close("_fail")

    def close(self) -> None:
        self.go()
        self.fail()

    def _close(self, name: str) -> None:
        fd = getattr(self, name)
        setattr(self, name, -1)
        if fd >= 0:
            os.close(fd)


Start = Callable[..., Exporting]


@pytest.fixture
def start(rallyrun: Launcher) -> Iterator[Start]:
    with ExitStack() as stack:

        def started(*flags: str, more: str) -> Exporting:
            exporting = Exporting(rallyrun, *flags, more=more)
            stack.callback(exporting.close)
            return exporting

        yield started


OTHERS = """
import os, sys
if os.environ["RANK"] != "0":
    {code} and open("fail").read()
    sys.exit({code})
"""
"""Rank 1 fails when it is told to, or succeeds at once."""


@pytest.mark.parametrize("code", [0, 3])
def test_an_exporter_of_a_rank_that_has_succeeded_writes_to_its_end(start: Start, code: int) -> None:
    exporting = start(ALL, more=OTHERS.format(code=code))
    pid = exporting.pid()
    exporting.fail()
    exporting.job.until_err(f"waiting for exporter.py (pid {pid}), which rank 0 left running")
    exporting.go()
    assert exporting.job.ends() == (1 if code else 0)
    assert exporting.trace.read_text() == "[]"
    assert "ended exporter" not in exporting.job.err


def test_what_takes_too_long_is_ended_and_named(rallyrun: Launcher, start: Start) -> None:
    exporting = start("--leftover-timeout=1", more=OTHERS.format(code=0))
    pid = exporting.pid()
    assert exporting.job.ends() == 0
    assert f"ended exporter.py (pid {pid}), which rank 0 left running after 1 s" in exporting.job.err
    rallyrun.until_gone(pid)


def test_nobody_waits_where_that_was_not_wanted(rallyrun: Launcher, start: Start) -> None:
    exporting = start("--leftover-timeout=0", more=OTHERS.format(code=0))
    pid = exporting.pid()
    assert exporting.job.ends() == 0
    assert "exporter" not in exporting.job.err
    rallyrun.until_gone(pid)
    assert exporting.trace.read_text() != "[]"


def test_a_restart_does_not_wait(rallyrun: Launcher, start: Start) -> None:
    more = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': raise SystemExit\n"
    more += "if os.environ['RANK'] == '1':\n    open('fail').read()\n    os._exit(3)\n"
    exporting = start(ALL, "--max-restarts=1", more=more)
    pid = exporting.pid()
    exporting.fail()
    assert exporting.job.ends() == 0
    assert "waiting for exporter" not in exporting.job.err
    rallyrun.until_gone(pid)


def test_what_does_nothing_is_not_waited_for(rallyrun: Launcher) -> None:
    script = rallyrun.script("import subprocess\nprint('left', subprocess.Popen(['sleep', '600']).pid, flush=True)")
    job = rallyrun("--standalone", ALL, script, env={"LOGLEVEL": "INFO"})
    assert job.ends() == 0
    (pid,) = [match[1] for match in map(LEFT.fullmatch, job.out) if match]
    assert f"ended sleep (pid {pid}), which rank 0 left running after 0 s" in job.err


def test_a_second_interrupt_waits_no_longer(rallyrun: Launcher, start: Start) -> None:
    exporting = start(ALL, more=OTHERS.format(code=0))
    exporting.job.until_err("waiting for exporter.py")
    exporting.job.signal(2)
    exporting.job.until_err("another interrupt will kill them at once")
    exporting.job.signal(2)
    exporting.job.ends()
    rallyrun.until_gone(exporting.pid())
