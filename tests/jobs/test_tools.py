"""Debuggers, tracers and monitors that replace functions for starting processes see the workers, not the reaper.

The tools are real ones. docs/how-to/debug.md lists what we tried with others, and with torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from rallypoint.base.python_memory import read_python
from rallypoint.observe.hangs.waits import waits_for
from tests.debug_adapter import Editor, Stop
from tests.jobs.launching import Job, Launcher
from tests.ports import free_port
from tests.processes import completed
from tests.waiting import until

WORKER = """
import os, signal, sys

def work(rank):
    return rank + 1  # the breakpoint

rank, restarts = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
result = work(rank)
if restarts == "0":
    if "MEET" in os.environ:  # once both have worked
        open("meeting", "w" if rank == 0 else "r").close()
    if rank == 0:
        sys.exit(3)
    while True:
        signal.pause()  # until it is stopped
os.write(1, f"{rank} {restarts} {result} {sys.argv[1:]}\\n".encode())
"""
LINE = 5
FLAGS = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
RALLYRUN = ("-m", "rallypoint.run", *FLAGS)


def prepare(rallyrun: Launcher) -> str:
    os.mkfifo(rallyrun.folder / "meeting")
    return rallyrun.script(WORKER)


def check_results(job: Job) -> None:
    assert job.ends() == 0, job.err
    assert sorted(line for line in job.out if "a b" in line) == ["0 1 1 ['a b']", "1 1 2 ['a b']"]


def debug(rallyrun: Launcher, script: str, *flags: str) -> tuple[Job, Editor]:
    """Start a job under debugpy, with an editor whose breakpoint is in the workers' program."""
    pytest.importorskip("debugpy")
    port = free_port()
    debugpy = [sys.executable, "-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client"]
    env = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}  # no warning about frozen modules
    job = rallyrun.command([*debugpy, *RALLYRUN, *flags, script, "a b"], env)
    return job, Editor(port, Path(script), LINE)


def waits(stop: Stop) -> str:
    return waits_for(stop.pid, read_python(stop.pid)[0])


def is_free(stop: Stop) -> bool:
    return waits(stop) != "it is paused by its debugger"


def rank_of(stop: Stop) -> str:
    environ = Path(f"/proc/{stop.pid}/environ").read_bytes().split(b"\0")
    return next(text.decode() for text in environ if text.startswith(b"RANK=")).removeprefix("RANK=")


@pytest.mark.parametrize("flags", [(), ("--preload=json",)], ids=["", "preload"])
def test_breakpoints_in_workers_are_hit_in_each_round(rallyrun: Launcher, flags: tuple[str, ...]) -> None:
    job, editor = debug(rallyrun, prepare(rallyrun), *flags)
    with closing(editor):
        stops = {rank_of(stop): stop for stop in editor.next_stops(2)}
        assert sorted(stops) == ["0", "1"]
        assert {waits(stop) for stop in stops.values()} == {"it is paused by its debugger"}
        stops["0"].go_on()  # and fails; rank 1 is stopped, held as it is
        for stop in editor.next_stops(2):
            assert stop.pid not in {old.pid for old in stops.values()}
            stop.go_on()
        job.until(lambda lines: len(lines) == 2, "the workers of the second round go on")
        assert len(editor.attached) == 4  # the workers alone
    check_results(job)
    assert ("start without preloading: a debugger" in job.err) == bool(flags)


def test_a_worker_that_a_debugger_does_not_hold_is_not_said_to_be_held(rallyrun: Launcher) -> None:
    script = prepare(rallyrun)
    job, editor = debug(rallyrun, script, "--max-restarts=0")
    with closing(editor):
        for stop in editor.next_stops(2):
            if rank_of(stop) == "1":
                stop.go_on()
                until(partial(is_free, stop), "rank 1 goes on")
    assert job.ends() == 1  # rank 0 has gone on when its editor left


def test_viztracer_has_each_worker_in_its_trace(rallyrun: Launcher) -> None:
    pytest.importorskip("viztracer")
    viztracer = [sys.executable, "-m", "viztracer", "-o", "trace.json"]
    (rallyrun.folder / "own").mkdir()
    env = {"MEET": "", "TMPDIR": str(rallyrun.folder / "own")}  # it leaves files there
    check_results(rallyrun.command([*viztracer, *RALLYRUN, prepare(rallyrun), "a b"], env))
    events = json.loads((rallyrun.folder / "trace.json").read_text())["traceEvents"]
    seen = Counter(event["pid"] for event in events if str(event["name"]).startswith("work "))
    assert len(seen) == 4  # two workers of each round
    assert set(seen.values()) == {1}


def test_coverage_measures_workers(rallyrun: Launcher) -> None:
    pytest.importorskip("coverage")
    (rallyrun.folder / ".coveragerc").write_text("[run]\npatch = subprocess\nparallel = true\n")
    script = prepare(rallyrun)
    check_results(rallyrun.command([sys.executable, "-m", "coverage", "run", *RALLYRUN, script, "a b"]))
    coverage = [sys.executable, "-m", "coverage"]
    completed([*coverage, "combine"], cwd=rallyrun.folder, check=True)
    completed([*coverage, "json", "-o", "covered.json", "--include", script], cwd=rallyrun.folder, check=True)
    (found,) = json.loads((rallyrun.folder / "covered.json").read_text())["files"].values()
    assert LINE in found["executed_lines"]
