"""Our report beside torch's for the same failures: the same lines, except where we mean to differ."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.failures.failure import ProcessFailure
from rallypoint.failures.report import ChildFailedError
from tests.conformance.record import Record

pytestmark = pytest.mark.torch

# Local rank, pid, exit code, seconds of its error file or None, by global rank.
Case = dict[int, tuple[int, int, int, int | None]]

TORCH_REPORTS = """
import json, sys
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
failures = {}
for rank, local_rank, pid, exitcode, file, noticed in json.loads(sys.argv[1]):
    failures[rank] = ProcessFailure(local_rank, pid, exitcode, file)
    if not file:
        failures[rank].timestamp = noticed
error = ChildFailedError("train.py", failures)
print(json.dumps([error.get_first_failure()[0], str(error)]))
"""


def _both(tmp_path: Path, record: Record, case: Case) -> tuple[list[object], list[object]]:
    """First failure and report, torch's and ours, without the folder of the test."""
    told, failures = [], {}
    for rank, (local_rank, pid, exitcode, seconds) in case.items():
        file = ""
        if seconds is not None:
            file = str(tmp_path / f"{rank}.json")
            extra = {"py_callstack": f"Traceback (most recent call last):\n  File {rank}\nE: x\n", "timestamp": seconds}
            Path(file).write_text(json.dumps({"message": {"message": "E: x", "extraInfo": extra}}))
        noticed = 2000 + local_rank
        told.append([rank, local_rank, pid, exitcode, file, noticed])
        failures[rank] = ProcessFailure(local_rank, pid, exitcode, file, noticed_at=noticed)
    command = [sys.executable, "-c", TORCH_REPORTS, json.dumps(told)]

    def ask() -> list[object]:
        first, text = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
        return [first, text.replace(str(tmp_path), "<here>")]

    question = [TORCH_REPORTS, json.dumps(told).replace(str(tmp_path), "<here>")]
    torchs = record.answer("errors_report", str(case), question, ask)
    error = ChildFailedError("train.py", failures)
    return torchs, [error.get_first_failure()[0], str(error).replace(str(tmp_path), "<here>")]


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The times in the reports are those of a zone, which must not be the machine's."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def _lines(report: object) -> list[str]:
    """The report without two deliberate differences: torch ends a call stack with an indented blank line, and where a
    worker said nothing it tells how to enable tracebacks; ours says that it said nothing.
    """
    said_nothing = re.compile(
        r"it exited with code \d+ and wrote nothing[^\n]*|To enable traceback see: .*",
    )
    lines = (said_nothing.sub("(nothing)", line) for line in str(report).split("\n") if line != "  ")
    return [line if line.strip("=-") else line[:1] for line in lines]  # a bar is as wide as the widest line


@pytest.mark.parametrize(
    "case",
    [
        {0: (0, 101, 3, None)},
        {0: (0, 101, -9, None)},
        {3: (1, 101, 1, 1000)},
        {0: (0, 101, -15, None), 1: (1, 102, 3, None), 2: (2, 103, -6, None)},
        {4: (0, 101, 1, 1003), 5: (1, 102, 1, 1001), 6: (2, 103, -11, None)},
    ],
)
def test_without_words_of_the_workers_the_reports_are_the_same(
    tmp_path: Path, record: Record, utc: None, case: Case
) -> None:
    torchs, ours = _both(tmp_path, record, case)
    assert ours[0] == torchs[0]
    # The one difference: getfqdn() there, gethostname() here (docs/contract/10-differences.md).
    there, here = f"  host      : {socket.getfqdn()}", f"  host      : {socket.gethostname()}"
    assert _lines(ours[1]) == [here if line == there else line for line in _lines(torchs[1])]
    assert here in _lines(ours[1])
