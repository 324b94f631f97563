"""`rallyctl demo` without torch: on a terminal, and ended before its end. (On a pipe: `tests/conformance`.)"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pyte
from docs.recording.cast import record

from rallypoint.base.process_table import process_table

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
    assert not {each.pid for each in process_table().values() if not each.ended} & {*pids}
