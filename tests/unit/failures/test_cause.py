"""Causes: failures as other nodes see them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.agent.spec import node_failure
from rallypoint.failures.cause import MAX_MESSAGE, MAX_TRACEBACK, Cause, Ending
from rallypoint.failures.explanation import message_and_traceback
from rallypoint.failures.failure import ProcessFailure, error_data, write_error_file
from rallypoint.failures.kinds import cannot_change, signature
from rallypoint.observe.status import failure_text
from rallypoint.observe.watching.messages import FailureView

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: boom'


def _of(exitcode: int, last_lines: bytes, error_file: str = "") -> Cause:
    failure = ProcessFailure(1, 77, exitcode, error_file, last_lines=last_lines, noticed_at=1000.5)
    return Cause.from_failure(failure, 5, "node7")


def test_from_standard_error() -> None:
    cause = _of(1, f"noise\n{TRACE}\n".encode())
    assert cause == Cause(5, 1, "node7", 77, 1, "ValueError: boom", TRACE, 1000.5, "")
    assert cause.signal_name == "<N/A>"
    assert _of(3, b"bad \xff luck\n").traceback == "bad \ufffd luck"
    assert _of(3, b"").traceback == ""


def test_a_recorded_message_without_a_call_stack(tmp_path: Path) -> None:
    (tmp_path / "e").write_text('{"message": "plain", "timestamp": 1000}')
    cause = _of(1, f"noise\n{TRACE}\n".encode(), str(tmp_path / "e"))
    assert (cause.message, cause.traceback) == ("plain", TRACE)
    assert _of(1, b"noise\n", str(tmp_path / "e")).traceback == ""


def test_a_signal_after_a_traceback() -> None:
    cause = _of(-9, f"{TRACE}\nsurvived\n".encode())
    assert cause.message == "Signal 9 (SIGKILL) received by PID 77"
    assert cause.traceback.endswith("survived")
    assert cause.signal_name == "SIGKILL"


MISSING = TRACE.replace("ValueError: boom", "ModuleNotFoundError: No module named 'apex'")


def test_a_missing_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "ModuleNotFoundError: No module named 'apex'"
    monkeypatch.setenv("VIRTUAL_ENV", "/home/ann/.venv")
    cause = _of(1, MISSING.encode())
    assert cause.message.startswith(f"{plain} (workers run ")
    assert "the active environment is /home/ann/.venv" in cause.message
    assert cannot_change(cause)
    assert "set PYTHON_EXEC=/home/ann/.venv/bin/python" in cause.message
    for program in ("/home/ann/.venv/bin/python", "sh", "/usr/bin/uv", "python3"):
        failure = ProcessFailure(0, 77, 1, "<N/A>", last_lines=MISSING.encode(), program=program)
        assert message_and_traceback(failure)[0] == plain
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert _of(1, MISSING.encode()).message == plain
    monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert _of(1, MISSING.encode()).message == plain
    (tmp_path / "uv-receipt.toml").touch()
    assert "where only Rallypoint is installed; activate the environment" in _of(1, MISSING.encode()).message


@pytest.mark.parametrize(
    "raised", ["KeyError: 'getpwuid(): uid not found: 54321'", "OSError: No username set in the environment"]
)
def test_a_user_without_a_name(raised: str) -> None:
    """Raised by `getpass.getuser` before and since Python 3.13."""
    cause = _of(1, TRACE.replace("ValueError: boom", raised).encode())
    assert cause.message == f"{raised} (this user id has no name on this machine; set LOGNAME or USER to one)"
    assert _of(1, TRACE.encode()).message == "ValueError: boom"


def test_a_worker_ended_by_its_debugger() -> None:
    cause = _of(1, TRACE.replace("ValueError: boom", "bdb.BdbQuit").encode())
    assert (cause.message, cause.traceback) == ("it was ended by its debugger", "")


def test_notes_below_a_traceback_do_not_change_the_signature() -> None:
    plain = _of(1, TRACE.encode())
    noted = plain._replace(traceback=f"{TRACE}\nthe disk is full under /tmp/x7: its last output might be missing there")
    assert signature(noted) == signature(plain) == "ValueError: boom"


def _with_stdout(last_stdout: bytes, stdout: str = "/logs/0/stdout.log", last_lines: bytes = b"") -> Cause:
    failure = ProcessFailure(1, 77, 1, "", last_lines=last_lines, last_stdout=last_stdout, stdout=stdout)
    return Cause.from_failure(failure, 5, "node7")


def test_from_standard_output() -> None:
    cause = _with_stdout(f"step 1\n{TRACE}\n".encode(), last_lines=b"UserWarning: slow\n")
    assert (cause.message, cause.traceback) == ("ValueError: boom", TRACE)
    cause = _with_stdout(b"no license left\n")
    assert (cause.message, cause.traceback) == ("it exited with code 1", "standard output:\nno license left")
    assert _with_stdout(b"step 1\n", last_lines=b"no license left\n").traceback == "no license left"
    cause = _with_stdout(TRACE.encode(), "/dev/null")
    assert cause.message == "ValueError: boom"
    assert cause.traceback == f"{TRACE}\n(standard output, which --local-ranks-filter hides from the console)"
    assert _with_stdout(b"", "/dev/null").message == "it exited with code 1 and wrote nothing"


def test_a_damaged_error_file(tmp_path: Path) -> None:
    (tmp_path / "e").write_text('{"message": half')
    cause = _of(1, b"words\n", str(tmp_path / "e"))
    assert cause.error_file == ""
    assert cause.traceback.startswith("words\n")
    assert '{"message": half' in cause.traceback


def test_a_long_traceback() -> None:
    lines = TRACE.split("\n")
    long = "\n".join([lines[0], *(f'  File "x.py", line {number}, in f' for number in range(1500)), lines[-1]])
    cause = _of(1, long.encode())
    assert cause.traceback.startswith(f'{lines[0]}\n  File "x.py", line 0, in f\n')
    assert "[...] at least 28 kB are cut here; all of it is in the worker's standard error" in cause.traceback
    assert cause.traceback.endswith("line 1499, in f\nValueError: boom")


def test_truncated_text_names_its_source(tmp_path: Path) -> None:
    long = f"Traceback (most recent call last):\nValueError: {'x' * 300_000}"
    path = str(tmp_path / "error.json")
    write_error_file(path, error_data("ValueError: " + "x" * 300_000, long, 1000.0))
    assert f"[the next line is cut; all of it is in {path} on node7]" in _of(1, b"", path).traceback
    failure = ProcessFailure(1, 77, 1, "", last_lines=long.encode(), log="/logs/stderr.log")
    cause = Cause.from_failure(failure, 5, "node7")
    assert "[the next line is cut; all of it is in /logs/stderr.log on node7]" in cause.traceback
    assert cause.message in cause.traceback
    failure = ProcessFailure(1, 77, -9, "", last_lines=b"word\n" * 100, log="/logs/stderr.log")
    assert Cause.from_failure(failure, 5, "node7").traceback.startswith(
        "[...] all of it is in /logs/stderr.log\nword\n"
    )


def test_a_failed_node() -> None:
    text = "no port for its workers"
    of_node = node_failure(text, Ending.INFRASTRUCTURE, exitcode=1)
    assert of_node.headline == f"{of_node.host}: {text}"
    assert of_node._replace(message=f"{of_node.host} has {text}").headline == f"{of_node.host} has {text}"
    view = FailureView(1.0, 3, "n1", of_node.host, -1, -1, of_node.pid, 1, of_node.headline)
    assert failure_text(view) == f"round 3: {of_node.host}: {text}"
    assert failure_text(view._replace(pid=0, message="it is silent")) == "round 3: n1 was lost: it is silent"


def test_headline() -> None:
    cause = _of(-9, b"")._replace(message="first\nsecond")
    assert cause.headline == "rank 5 failed on node7 (exit code -9, SIGKILL): first"
    assert cause._replace(exitcode=3, message="x" * 2000).headline.startswith(
        "rank 5 failed on node7 (exit code 3): xxx"
    )
    assert len(cause._replace(message="x" * 2000).headline) < 500


@given(st.text(max_size=40), st.text(max_size=40), st.integers(1, 2000))
def test_size_limits(words: str, more: str, times: int) -> None:
    failure = ProcessFailure(0, 1, 1, "", last_lines=(words + "\n" + more * times).encode("utf-8", "replace"))
    failure.message = "\ud800" + more * times
    cause = Cause.from_failure(failure, 0, "h")
    assert len(cause.message.encode()) <= MAX_MESSAGE
    assert len(cause.traceback.encode()) <= MAX_TRACEBACK
    assert Cause(**json.loads(json.dumps(cause._asdict()))) == cause


def test_a_reason_is_the_message() -> None:
    for exitcode, last_lines in ((0, b""), (3, f"{TRACE}\n".encode()), (-9, b"words\n")):
        failure = ProcessFailure(1, 77, exitcode, "", last_lines=last_lines, noticed_at=1000.5)
        failure.set_reason("")
        assert failure.reason == ""
        failure.set_reason("a bird flew in")
        cause = Cause.from_failure(failure, 5, "node7")
        assert (failure.message, cause.message) == ("a bird flew in", "a bird flew in")
        assert cause.traceback == last_lines.decode().rstrip()


def test_a_crash_shows_the_current_thread() -> None:
    folder = "/a/long/way/to/the/library" * 9
    frames = "".join(f'  File "{folder}/lib.py", line {number} in wait\n' for number in range(12))
    others = "".join(f"Thread 0x0000{number:04x} (most recent call first):\n{frames}\n" for number in range(40))
    own = 'Current thread 0x00ff (most recent call first):\n  File "x.py", line 7 in main\n'
    words = f"noise\nfree(): invalid pointer\nFatal Python error: Aborted\n\n{others}{own}\nExtension modules: a, b\n"
    shown = _of(-6, words.encode()).traceback.split("\n")
    assert shown[1:6] == [
        "free(): invalid pointer",
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x00ff (most recent call first):",
        '  File "x.py", line 7 in main',
    ]
    assert shown[-1] == "[...]"


def test_a_nested_launcher() -> None:
    report = """Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
====================
inner.py FAILED
--------------------
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 12)  (SIGTERM)
--------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 3 (pid: 11) 
  error_file: <N/A>
====================
"""  # noqa: W291 - as it is printed
    cause = _of(1, report.encode())
    assert cause.message == "inner.py FAILED: rank 0 (local_rank: 0), exitcode 3 (pid: 11)"
    assert "inner.py FAILED" in cause.traceback
    assert _of(1, report.partition("====")[0].encode()).message.endswith("ChildFailedError:")
