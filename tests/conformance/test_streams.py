"""Standard streams that are closed, or that nothing reads.

The exit codes are torchrun's, or those it would have if Python had not replaced them (docs/contract/10-differences.md).
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.conformance.record import Record
from tests.conformance.side_by_side.case import Entry, Side
from tests.jobs.launching import Launcher

pytestmark = pytest.mark.torch

LOUD = """
import sys, time
for _ in range(50):
    print("word", file=sys.stderr, flush=True)
    time.sleep(0.01)
print("done")
"""
"""Half a second, in which a reader that has gone is noticed."""

PROGRAMS = {"loud.py": LOUD, "fails.py": "import sys; print('fails', file=sys.stderr); sys.exit(3)"}

CLOSED = "<&- >&- 2>&-"
UNREAD = "2>&1"
"""Standard error and standard output are one pipe, whose reader has gone: after `2>&1 | head`."""
ERR_UNREAD = ">/dev/null"
"""Standard error alone is that pipe."""

UNFLUSHED = 120
"""Python's exit code where its last flush has failed."""

CASES = {
    ("--standalone loud.py", CLOSED): (0, 0),
    ("--standalone loud.py", UNREAD): (UNFLUSHED, 1),
    ("--standalone loud.py", ERR_UNREAD): (UNFLUSHED, 1),
    ("--standalone -t 3 loud.py", UNREAD): (UNFLUSHED, 0),
    ("--standalone fails.py", CLOSED): (1, 1),
    ("--nope loud.py", UNREAD): (UNFLUSHED, 2),
}
"""torchrun's exit codes, and ours."""


def exit_code(launcher: Launcher, side: Side, words: str, streams: str) -> int:
    """How a command ends whose standard output and error are a pipe without a reader, but for what `streams` says."""
    reading, writing = os.pipe()
    os.close(reading)
    own = launcher.folder / side.value  # where logs that were asked for stay
    own.mkdir(exist_ok=True)
    try:
        return subprocess.run(
            ["bash", "-c", f'exec "$@" {streams}', "-", *Entry.COMMAND.command(side), *words.split()],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            env=launcher.environment({"TMPDIR": str(own)}),
            cwd=launcher.folder,
            timeout=60,
            check=False,
        ).returncode
    finally:
        os.close(writing)


def test_exit_codes_where_nobody_reads(launcher: Launcher, record: Record) -> None:
    for name, text in PROGRAMS.items():
        Path(launcher.folder, name).write_text(text)

    def torchs(words: str, streams: str) -> object:
        ask = lambda: exit_code(launcher, Side.TORCH, words, streams)  # noqa: E731
        return record.answer("streams", f"{words} {streams}", [PROGRAMS, words, streams], ask)

    with ThreadPoolExecutor(2) as pool:
        for side, whose in enumerate((torchs, partial(exit_code, launcher, Side.OURS))):
            codes = pool.map(lambda case, whose=whose: whose(*case), CASES)
            assert dict(zip(CASES, codes, strict=True)) == {case: both[side] for case, both in CASES.items()}, whose
