"""What a program under pdb waits for, at its prompt and elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.python_memory import Unreadable, read_python
from rallypoint.observe.hangs.waits import waits_for
from tests.waiting import until

pytestmark = pytest.mark.process

PROGRAM = """
import sys
def work():
    if sys.argv[1] == "stops":
        breakpoint()
    open("nothing").read()
work()
"""


@contextmanager
def running(folder: Path, *words: str) -> Iterator[int]:
    (folder / "program.py").write_text(PROGRAM)
    os.mkfifo(folder / "nothing")
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        yield process.pid
        process.kill()


def found(pid: int) -> str:
    """What is said of a program that has come to its function `work`; empty before."""
    try:
        main = read_python(pid)[0]
    except Unreadable:  # it starts
        return ""
    return f"said: {waits_for(pid, main)}" if any(frame.function == "work" for frame in main.frames) else ""


@pytest.mark.parametrize("words", [("program.py",), ("-m", "pdb", "-c", "continue", "program.py")])
def test_a_program_at_a_prompt_is_told_from_one_that_runs(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "stops").mkdir()
    with running(tmp_path / "stops", *words, "stops") as pid:
        until(lambda: found(pid) == "said: it is at a prompt of pdb", lambda: found(pid))
    (tmp_path / "runs").mkdir()
    with running(tmp_path / "runs", *words, "runs") as pid:
        assert "prompt" not in until(lambda: found(pid))
