"""Exceptions that a program survives, and its output afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.failures.cause import Cause
from rallypoint.failures.failure import ProcessFailure
from rallypoint.failures.handlers import survives
from rallypoint.failures.kinds import signature
from rallypoint.failures.report import failure_detail


@pytest.mark.parametrize(
    ("handler", "function", "expected"),
    [
        ("traceback.print_exc()", "<module>", True),
        ("log.exception('x'); metrics = None", "push", True),
        ("traceback.print_exc(); sys.exit(1)", "<module>", False),
        ("traceback.print_exc(); os._exit(3)", "<module>", False),
        ("traceback.print_exc(); raise", "<module>", False),
        ("raise SystemExit('x') from None", "<module>", False),
    ],
)
def test_handlers(tmp_path: Path, handler: str, function: str, expected: bool) -> None:
    (tmp_path / "x.py").write_text(f"f()\ntry:\n    f()\nexcept OSError:\n    {handler}\nelse:\n    f()\n")
    assert survives(str(tmp_path / "x.py"), 3, function) is expected
    assert not survives(str(tmp_path / "x.py"), 1, function)
    assert not survives(str(tmp_path / "x.py"), 7, function)
    (tmp_path / "x.py").write_text("try:\n    f()\nfinally:\n    g()\n")
    assert not survives(str(tmp_path / "x.py"), 2, "<module>")


@pytest.mark.parametrize(
    ("returned", "function", "expected"),
    [("", "push", True), ("False", "push", True), ("1", "push", False), ("code", "main", False)],
)
def test_handlers_that_return(tmp_path: Path, returned: str, function: str, expected: bool) -> None:
    source = f"def {function}():\n    try:\n        f()\n    except OSError:\n        return {returned}\n"
    (tmp_path / "x.py").write_text(source)
    assert survives(str(tmp_path / "x.py"), 3, function) is expected


def test_files_without_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\0\xff")
    (tmp_path / "wrong").write_text("try:")
    (tmp_path / "large").write_text("try:\n    f()\nexcept OSError:\n    pass\n" + "#" * 300_000)
    for name in ("pipe", "binary", "wrong", "large", "missing", "a\0b", ""):
        assert not survives(str(tmp_path / name), 2, "<module>")


SURVIVED = """\
import traceback
try:
    connect()
except ConnectionError:
    traceback.print_exc()
train()
"""


def _cause(folder: Path, after: str, *, line: int = 3, stdout: str = "") -> Cause:
    (folder / "x.py").write_text(SURVIVED)
    shown = f'Traceback (most recent call last):\n  File "{folder}/x.py", line {line}, in <module>\nE: no server\n'
    last_lines, last_stdout = (after, shown + stdout) if stdout else (shown + after, "")
    failure = ProcessFailure(1, 77, 1, "", last_lines=last_lines.encode(), last_stdout=last_stdout.encode())
    return Cause.from_failure(failure, 5, "node7")


def test_output_after_a_survived_exception(tmp_path: Path) -> None:
    assert _cause(tmp_path, "step 1\nbye\n", line=6).message == "E: no server", "not survived"
    assert _cause(tmp_path, "INFO:root:bye\n").message == "E: no server", "no better message"
    cause = _cause(tmp_path, "step 1\nthe quota is used up\nINFO:root:bye\n")
    assert (cause.message, signature(cause)) == ("the quota is used up", "the quota is used up")
    detail = failure_detail(cause)
    assert detail.startswith("the quota is used up; the last lines of standard error:\nTraceback")
    assert detail.endswith("E: no server\nstep 1\nthe quota is used up\nINFO:root:bye")


def test_fatal_exceptions_count_before_survived_ones(tmp_path: Path) -> None:
    ended = 'Traceback (most recent call last):\n  File "y.py", line 1, in <module>\nValueError: boom\n'
    later = 'Traceback (most recent call last):\n  File "x.py", line 3, in close\nE: no server\n'
    failure = ProcessFailure(1, 77, 1, "", last_lines=(ended + "WARNING:root:again\n" + later).encode())
    (tmp_path / "x.py").write_text(SURVIVED)
    failure.last_lines = failure.last_lines.replace(b"x.py", os.fsencode(tmp_path / "x.py"))
    assert Cause.from_failure(failure, 5, "node7").message == "ValueError: boom"


def test_standard_error_counts_before_standard_output(tmp_path: Path) -> None:
    cause = _cause(tmp_path, "the quota is used up\n", stdout="step 1\n")
    assert "no server" not in cause.message + cause.traceback
    assert cause.traceback.endswith("the quota is used up")
    cause = _cause(tmp_path, "", stdout="step 1\n")
    assert failure_detail(cause).startswith("step 1; the last lines of standard output:\nTraceback")


def test_old_exceptions_do_not_count(tmp_path: Path) -> None:
    after = "[...]\n" + "INFO:root:step\n" * 90
    assert _cause(tmp_path, after).message == "it exited with code 1"
    assert "no server" not in _cause(tmp_path, after).traceback
    assert _cause(tmp_path, after, line=6).message == "E: no server"


FRAMES = "".join(f"frame #{number}: in libtorch.so\n" for number in range(60))


def _crash(text: str, exitcode: int = -6) -> Cause:
    return Cause.from_failure(ProcessFailure(1, 77, exitcode, "", last_lines=text.encode()), 5, "node7")


def test_a_crash_after_an_exception(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(SURVIVED)
    for line, is_named in ((6, True), (3, False)):
        raised = f'Traceback (most recent call last):\n  File "{tmp_path}/x.py", line {line}, in <module>\nE: boom\n'
        cause = _crash(f"{raised}terminate called without an active exception\n{FRAMES}")
        assert cause.message == "Signal 6 (SIGABRT) received by PID 77" + ", after E: boom" * is_named
        assert (raised.rstrip() in cause.traceback) is is_named
        assert "terminate called without an active exception\n[...]\n" in cause.traceback
        assert _crash(raised + FRAMES, -9).message == "Signal 9 (SIGKILL) received by PID 77"


def test_a_c_plus_plus_exception() -> None:
    thrown = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error\nRaised from x.cpp:43"
    assert _crash(f"{thrown}\n{FRAMES}").traceback.startswith(f"{thrown}\n[...]\nframe #30")
    assert _crash(thrown).traceback == thrown
    assert _crash("words\n" + FRAMES).traceback.startswith("frame #30")
