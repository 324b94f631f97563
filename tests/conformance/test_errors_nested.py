"""A launcher that is another launcher's worker: the innermost worker's cause reaches the outermost error file.

All four pairs of ours and torch's. torch's launcher only copies error files (contract section 7.4); for the rest, the
tests compare with ours.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.record import Record
from tests.jobs.launching import RALLYRUN, Launcher

pytestmark = pytest.mark.torch

COMMANDS = {"ours": RALLYRUN, "torch": [str(Path(sys.executable).parent / "torchrun")]}
BODY = """
import os, sys, time
from rallypoint import record

@record
def recorded():
    raise ValueError("boom recorded")

def plain():
    raise ValueError("boom plain")

def signal():
    os.kill(os.getpid(), 9)

if os.environ["RANK"] == "0":
    time.sleep(600)
"""


class Outcome(NamedTuple):
    """How the outer launcher ended: its report's root cause, its error file's message, and the inner worker's pid."""

    root: str
    message: str
    callstack: str
    code: object
    innermost: str


@pytest.fixture
def nested(launcher: Launcher, record: Record) -> Callable[[str, str, str], Outcome]:
    """Runs an outer launcher whose only worker is an inner one with two workers, the second of which fails.

    Where both are torch's the outcome may be recorded, and has no frames.
    """

    def run(outer: str, inner: str, end: str) -> Outcome:
        pid, file = launcher.folder / "pid", launcher.folder / "error.json"
        script = launcher.script(f"{BODY}open({str(pid)!r}, 'w').write(str(os.getpid()))\n{end}()\n", "inner.py")
        common = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        within = [*COMMANDS[inner], *common, "--nproc-per-node=2", "--log-dir=logs-inner", script]
        command = [*COMMANDS[outer], *common, "--log-dir=logs-outer", "--no-python", *within]
        job = launcher.command(command, {"TORCHELASTIC_ERROR_FILE": str(file)})
        assert job.ends() == 1, job.err
        message = json.loads(file.read_text())["message"] if file.exists() else {}
        callstack = message.get("extraInfo", {}).get("py_callstack", "")
        root = job.err.rpartition("\nRoot Cause")[2]  # the inner one's own report is indented
        return Outcome(root, message.get("message", ""), callstack, message.get("errorCode"), pid.read_text())

    def recorded(end: str) -> Outcome:
        def plain() -> list[object]:
            return [_without_frames(each) if isinstance(each, str) else each for each in run("torch", "torch", end)]

        return Outcome(*record.answer("errors_nested", end, [BODY, end], plain))

    return lambda outer, inner, end: recorded(end) if (outer, inner) == ("torch", "torch") else run(outer, inner, end)


def _without_frames(text: str) -> str:
    """The lines of a report or a stack that do not change with the files that are named in it."""
    lasting = re.compile(r" *(Traceback|ValueError|traceback : )")
    return "".join(line for line in text.splitlines(keepends=True) if lasting.match(line))


PAIRS = pytest.mark.parametrize(("outer", "inner"), [(outer, inner) for outer in COMMANDS for inner in COMMANDS])


@PAIRS
def test_an_exception_that_nobody_recorded(nested: Callable[[str, str, str], Outcome], outer: str, inner: str) -> None:
    outcome = nested(outer, inner, "plain")
    if inner == "ours":
        assert (outcome.message, outcome.code) == ("ValueError: boom plain", 1)
        assert outcome.callstack.endswith("\nValueError: boom plain")
        assert "  ValueError: boom plain\n" in outcome.root
    elif outer == "ours":
        told = f"inner.py FAILED: rank 1 (local_rank: 1), exitcode 1 (pid: {outcome.innermost})"
        assert (outcome.message.rpartition("/")[2], outcome.code) == (told, 1)
        assert told in outcome.root
    else:
        assert (outcome.message, outcome.code) == ("", None), "torch writes no file, so that nobody learns"
        assert "To enable traceback" in outcome.root


@PAIRS
def test_a_death_by_signal(nested: Callable[[str, str, str], Outcome], outer: str, inner: str) -> None:
    outcome = nested(outer, inner, "signal")
    if inner == "ours":
        told = f"Signal 9 (SIGKILL) received by PID {outcome.innermost}"
        assert (outcome.message, outcome.callstack, outcome.code) == (told, told, 1)
        assert f"traceback : {told}\n" in outcome.root
    elif outer == "ours":
        told = f"inner.py FAILED: rank 1 (local_rank: 1), exitcode -9 (pid: {outcome.innermost})  (SIGKILL)"
        assert (outcome.message.rpartition("/")[2], outcome.code) == (told, 1)
        assert told in outcome.root
    else:
        assert (outcome.message, outcome.code) == ("", None), "torch writes no file, so that nobody learns"
