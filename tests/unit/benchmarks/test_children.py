"""The processes of a benchmark: their lines arrive, and nothing outlives the block, however it was started."""

from __future__ import annotations

import sys
import time

import pytest
from benchmarks.children import Children
from benchmarks.errors import BenchError

from rallypoint.base.process_table import read_stat

pytestmark = pytest.mark.process

_ORPHANING = """
import subprocess, sys
code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
sys.stdin.read()
"""


def _runs(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state != "Z"  # an orphan's zombie waits for init, not for us


def test_a_grandchild_that_hides_in_a_session_of_its_own_is_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with Children() as children:
        children.start("parent", [sys.executable, "-c", _ORPHANING])
        pid = int(children.next_line(time.monotonic() + 30, "the grandchild's pid").text)
        assert _runs(pid)
    assert not _runs(pid)
    assert f"process {pid} " in capsys.readouterr().err


def test_a_child_that_ends_too_early_is_named_with_its_last_words() -> None:
    with Children() as children:
        children.start("parent", [sys.executable, "-c", "raise SystemExit('out of luck')"])
        with pytest.raises(BenchError, match="parent ended before its line; it said: out of luck"):
            children.next_line(time.monotonic() + 30, "its line")


def test_a_deadline_names_what_was_awaited() -> None:
    with Children() as children:
        children.start("parent", [sys.executable, "-c", "import sys; sys.stdin.read()"])
        with pytest.raises(BenchError, match="its line did not come in time; parent said: nothing"):
            children.next_line(time.monotonic() - 1, "its line")
