"""Waits of a program under pdb."""

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
    """The wait of a program in its function `work`, empty before."""
    try:
        main = read_python(pid)[0]
    except Unreadable:  # still starting
        return ""
    return f"found: {waits_for(pid, main)}" if any(frame.function == "work" for frame in main.frames) else ""


@pytest.mark.parametrize("words", [("program.py",), ("-m", "pdb", "-c", "continue", "program.py")])
def test_prompts_of_pdb(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "stops").mkdir()
    with running(tmp_path / "stops", *words, "stops") as pid:
        until(lambda: found(pid) == "found: it is at a prompt of pdb", lambda: found(pid))
    (tmp_path / "runs").mkdir()
    with running(tmp_path / "runs", *words, "runs") as pid:
        assert "prompt" not in until(lambda: found(pid))
