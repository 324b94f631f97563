"""Error files in both directions: torch's `record` writes and we read; ours writes and torch's launcher reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.failures.cause import Cause
from rallypoint.failures.failure import ProcessFailure
from rallypoint.failures.tracebacks import clean_lines, last_traceback
from tests.conformance.record import From, Record
from tests.processes import completed

pytestmark = pytest.mark.torch

PROGRAM = """
import sys
from {module} import record

@record
def main():
    try:
        {{}}["missing"]
    except KeyError as first:
        {end}

main()
print("after")
"""

MODULES = {"torch": "torch.distributed.elastic.multiprocessing.errors", "ours": "rallypoint"}

TORCH_READS = """
import json, sys
from torch.distributed.elastic.multiprocessing import ProcessFailure
failure = ProcessFailure(1, 77, 1, sys.argv[1])
print(json.dumps([failure.error_file, failure.error_file_data, failure.message, failure.timestamp]))
"""


def _run(whose: str, end: str, file: Path) -> subprocess.CompletedProcess[str]:
    code = PROGRAM.format(module=MODULES[whose], end=end)
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    return completed([sys.executable, "-c", code], env=env)


def _torch_reads(file: Path) -> list[object]:
    done = subprocess.run([sys.executable, "-c", TORCH_READS, str(file)], capture_output=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def _ours_reads(file: Path) -> list[object]:
    failure = ProcessFailure(1, 77, 1, str(file))
    return [failure.error_file, failure.error_file_data, failure.message, failure.timestamp]


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_each_reads_the_same_out_of_the_other_s_file(tmp_path: Path, whose: str) -> None:
    file = tmp_path / "error.json"
    done = _run(whose, 'raise ValueError("boom ü") from first', file)
    assert done.returncode == 1
    assert _ours_reads(file) == _torch_reads(file)
    failure = ProcessFailure(1, 77, 1, str(file))
    assert failure.text == "ValueError: boom ü"
    assert failure.timestamp <= failure.moment < failure.timestamp + 2
    assert "KeyError: 'missing'" in failure.callstack
    assert failure.callstack.endswith("\nValueError: boom ü\n")


def test_both_write_the_same_members(tmp_path: Path, record: Record) -> None:
    end = 'raise ValueError("boom") from first'

    def shape(whose: str) -> list[object]:
        file = tmp_path / whose
        _run(whose, end, file)
        message = json.loads(file.read_text())["message"]
        extra = message.pop("extraInfo")
        return [message, sorted(extra), type(extra["timestamp"]).__name__, extra["py_callstack"].split("\n")[0]]

    theirs = record.answer("errors_files", "members", [PROGRAM, end], lambda: shape("torch"), From.PYTHON)
    assert shape("ours") == theirs


@pytest.mark.parametrize(
    "end", ["return", "sys.exit(0)", "sys.exit()", "sys.exit(3)", "sys.exit('text')", "raise KeyboardInterrupt"]
)
def test_both_treat_exits_alike(tmp_path: Path, record: Record, end: str) -> None:
    def seen(whose: str) -> list[object]:
        done = _run(whose, end, tmp_path / whose)
        last = done.stderr.strip().split("\n")[-1]
        return [done.returncode, done.stdout, last, (tmp_path / whose).exists()]

    theirs = record.answer("errors_files", end, [PROGRAM, end], lambda: seen("torch"), From.PYTHON)
    assert seen("ours") == theirs


@pytest.mark.parametrize(
    "content",
    [
        '{"message": "plain", "timestamp": 12}',
        '{"message": "plain"}',
        '{"message": {"message": "E: x", "errorCode": 3, "extraInfo": {"py_callstack": "T", "timestamp": "12"}}}',
    ],
)
def test_both_read_the_forms_of_other_writers_alike(tmp_path: Path, record: Record, content: str) -> None:
    file = tmp_path / "error.json"
    file.write_text(content)
    os.utime(file, (0, 0))

    def torchs() -> object:
        return json.loads(json.dumps(_torch_reads(file)).replace(str(file), "FILE"))

    theirs = record.answer("errors_files", content, TORCH_READS, torchs)
    assert json.loads(json.dumps(_ours_reads(file)).replace(str(file), "FILE")) == theirs


def test_torch_s_marked_traceback_is_found_on_standard_error() -> None:
    code = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    {}["missing"]
except KeyError as first:
    raise ValueError("boom\\n\\nsecond part") from first
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False, timeout=60)
    assert b"[rank0]: Traceback" in done.stderr
    found = last_traceback(clean_lines(done.stderr))
    assert found.startswith("Traceback (most recent call last):\n")
    assert "KeyError: 'missing'\n\nThe above exception was the direct cause" in found
    assert found.endswith("ValueError: boom\n\nsecond part")
    cause = Cause.from_failure(ProcessFailure(0, 1, 1, "", last_lines=done.stderr), 0, "here")
    assert (cause.message, cause.traceback) == ("ValueError: boom", found)
