"""`rallyctl demo` without torch: on a terminal, and ended before its end. (On a pipe: `tests/conformance`.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import pytest
from docs.recording.cast import record

from rallypoint.base.errors import RallypointError
from rallypoint.base.process_table import process_table
from rallypoint.demo.account import Lines
from rallypoint.demo.scenarios import OURS, Plan, demo
from rallypoint.demo.track import Track
from tests.processes import below

RALLYCTL = str(Path(sys.executable).with_name("rallyctl"))


def test_on_a_terminal_each_run_is_a_bar() -> None:
    """The screen at the end: both kills in the middle, each run done, and the table."""
    cast = record([RALLYCTL, "demo", "--steps=40", "--no-torchrun"], (80, 26), "", 90.0)
    screen = pyte.Screen(cast.width, cast.height)
    stream = pyte.Stream(screen)
    for _, text in cast.events:
        stream.feed(text)
    shown = [line.rstrip() for line in screen.display]
    assert shown.count("A training job loses a worker, then a node, and goes on.") == 1
    bars = [line for line in shown if line.startswith("  rallyrun ")]
    assert len(bars) == 3
    assert all("━" in bar and " 40/40 " in bar for bar in bars)
    assert [re.sub(r"[\d.]+ s", "N s", bar.partition("/40 ")[2]) for bar in bars] == [
        "done in N s",
        "went on after N s, done",
        "went on after N s, done",
    ]
    assert [bar.count("✗") for bar in bars] == [0, 1, 1]
    assert any(re.match(r"a node lost, until the next step +\d+\.\d\d s$", line) for line in shown)
    assert any(line.startswith("and ended as if nothing had happened") for line in shown)
    assert cast.events[-1][1].endswith("\x1b[?25h"), "the cursor is given back"


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
    assert said == "rallyctl: error: standard output cannot be written: Broken pipe; send it elsewhere\n"
    assert process.returncode == 1
    assert not _running() & {*pids}


def test_a_terminal_that_goes_away_ends_the_demo_with_a_sentence() -> None:
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (26, 80))
    env = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    command = [RALLYCTL, "demo", "--no-torchrun"]
    with subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE, env=env, text=True) as process:
        os.close(slave)
        shown = b""
        while b"first step" not in shown:
            shown += os.read(master, 65536)
        pids = below(process.pid)
        os.close(master)
        assert process.stderr is not None
        said = process.stderr.read()
    assert said == "rallyctl: error: standard output cannot be written: Input/output error; send it elsewhere\n"
    assert process.returncode == 1
    assert pids
    assert not _running() & {*pids}


class _Unwritable(Lines):
    """Cannot show that a job has been started."""

    def show(self, track: Track) -> None:
        raise RallypointError(f"nobody sees {track.launcher}")


def test_a_job_whose_start_cannot_be_shown_is_ended() -> None:
    before = below(os.getpid())
    with pytest.raises(RallypointError, match="nobody sees rallyrun"):
        demo(Plan(["-m", "rallypoint.demo.worker"], 40, [OURS], 60.0), _Unwritable(lambda _: None))
    assert below(os.getpid()) == before


def _running() -> set[int]:
    return {each.pid for each in process_table().values() if not each.ended}
