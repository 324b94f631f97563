"""`rallyctl demo` without torch: to its end, and interrupted. (With torch: `tests/conformance`.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.base.errors import RallypointError
from rallypoint.base.process_table import process_table
from rallypoint.cli.demo.job import DemoPlan, demo
from tests.processes import below, completed

RALLYCTL = str(Path(sys.executable).with_name("rallyctl"))


def test_each_kill_is_survived_and_the_table_says_so() -> None:
    command = [RALLYCTL, "demo", "--steps=40"]
    done = completed(command, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(r"resumed from step [1-9]", done.stdout)) == 2
    assert re.search(r"(?m)^a worker killed, until the next step +\d+\.\d\d s$", done.stdout)
    assert re.search(r"(?m)^a node lost, until the next step +\d+\.\d\d s$", done.stdout)


def test_sigterm_ends_the_jobs_of_the_demo_too() -> None:
    pids: list[int] = []
    with subprocess.Popen([RALLYCTL, "demo"], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if found := re.search(r"2 workers started: pids \[(\d+), (\d+)\]", line):
                pids = [int(found[1]), int(found[2])]
            if "first step" in line:
                demo.send_signal(signal.SIGTERM)
    assert demo.returncode == 143
    assert len(pids) == 2
    assert not _running() & {*pids}


@pytest.mark.parametrize("last", ["\n", "$ rallyrun", "first step"])
def test_a_reader_that_goes_away_ends_the_demo_with_a_sentence(last: str) -> None:
    with subprocess.Popen([RALLYCTL, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        next(line for line in process.stdout if last in line)
        pids = below(process.pid)
        process.stdout.close()
        said = process.stderr.read()
    assert said == "rallyctl: error: standard output cannot be written: Broken pipe; redirect it elsewhere\n"
    assert process.returncode == 1
    assert not _running() & {*pids}


def test_a_job_whose_start_cannot_be_shown_is_ended() -> None:
    def write(text: str) -> None:
        if "workers started" in text:
            raise RallypointError("nobody sees it")

    before = below(os.getpid())
    with pytest.raises(RallypointError, match="nobody sees it"):
        demo(DemoPlan(["-m", "rallypoint.cli.demo.worker"], 40, 60.0), write)
    assert below(os.getpid()) == before


def _running() -> set[int]:
    return {each.pid for each in process_table().values() if not each.ended}
