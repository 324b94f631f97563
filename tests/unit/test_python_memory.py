"""Reading the memory of Python processes, with each Python on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.python_memory import PythonThread, UnknownPython, Unreadable, read_python
from tests.waiting import until

pytestmark = pytest.mark.process


def _find(version: str) -> list[str]:
    """The path of this Python version, if it is installed: on the path or in pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    paths = [shutil.which(f"python{version}"), *map(str, root.glob(f"{version}.*/bin/python"))]
    return [path for path in paths if path and "/shims/" not in path][:1]


def _pythons() -> list[str]:
    """This Python, and others with known layouts."""
    return [sys.executable, *(path for version in ("3.12", "3.13", "3.14") for path in _find(version))]


@contextmanager
def _running(python: str, code: str, tmp_path: Path) -> Iterator[int]:
    """Run code until it is ready."""
    script = tmp_path / "script.py"
    script.write_text(code)
    with subprocess.Popen([python, str(script)], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"READY\n"
            yield process.pid
        finally:
            process.kill()


_WAIT = "\n\ndef wait(number):\n    print('READY', flush=True)\n    time.sleep(number)\n\n"


def _asleep(pid: int) -> tuple[PythonThread, ...]:
    """The threads, once the process sleeps in `wait`."""
    found: list[tuple[PythonThread, ...]] = []

    def sleeps() -> bool:
        found.append(read_python(pid))
        return found[-1][0].frames[0].line == 5

    until(sleeps, "it sleeps")
    return found[-1]


@pytest.mark.parametrize("python", _pythons())
def test_stacks(python: str, tmp_path: Path) -> None:
    code = f"import threading, time{_WAIT}gate = threading.Event()\n"
    code += "threading.Thread(target=gate.wait, daemon=True).start()\n\n\ndef train():\n    wait(600)\n\n\ntrain()\n"
    with _running(python, code, tmp_path) as pid:
        main, other = _asleep(pid)
        assert main.native_id == pid
        script = str(tmp_path / "script.py")
        assert [(frame.function, frame.file, frame.line) for frame in main.frames] == [
            ("wait", script, 5),
            ("train", script, 12),
            ("<module>", script, 15),
        ]
        assert main.exceptions == ()
        assert main.arguments[0] == 600
        assert [frame.function for frame in other.frames[:2]] == ["Condition.wait", "Event.wait"]


_RAISES = f"import time{_WAIT}def load(batch):\n    raise ValueError(f'batch {{batch}} has no labels')\n\n\n"
_IN_FINALLY = f"{_RAISES}try:\n    load(7)\nfinally:\n    wait(600)\n"
_IN_WITH = (
    f"{_RAISES}class Group:\n    def __enter__(self): pass\n    def __exit__(self, *_): wait(600)\n\n\n"
    "with Group():\n    load(7)\n"
)
_IN_EXCEPT = f"{_RAISES}try:\n    load(7)\nexcept (KeyError, ValueError):\n    wait(600)\n"
_IN_BARE_EXCEPT = f"{_RAISES}try:\n    load(7)\nexcept:\n    wait(600)\n"


@pytest.mark.parametrize("python", _pythons())
@pytest.mark.parametrize(
    ("code", "cleans_up"), [(_IN_FINALLY, True), (_IN_WITH, True), (_IN_EXCEPT, False), (_IN_BARE_EXCEPT, False)]
)
def test_exceptions(python: str, code: str, cleans_up: bool, tmp_path: Path) -> None:
    with _running(python, code, tmp_path) as pid:
        (exception,) = _asleep(pid)[0].exceptions
        assert exception.line == "ValueError: batch 7 has no labels"
        assert [(frame.function, frame.line) for frame in exception.frames][-1] == ("load", 8)
        assert exception.cleans_up is cleans_up
        assert exception.traceback.endswith("in load\nValueError: batch 7 has no labels")


@pytest.mark.parametrize("python", _pythons())
@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("KeyError('labels')", "KeyError: labels"),
        ("OSError(28, 'No space left on device')", "OSError: [Errno 28] No space left on device"),
        ("RuntimeError()", "RuntimeError"),
        ("RuntimeError('é €😀', -5, 2**40, None)", "RuntimeError: 'é €😀', -5, 1099511627776, ..."),
        ("RuntimeError('x' * 10_000)", f"RuntimeError: {'x' * 2048}"),
    ],
)
def test_texts_of_exceptions(python: str, raised: str, line: str, tmp_path: Path) -> None:
    code = f"import time{_WAIT}try:\n    raise {raised}\nfinally:\n    wait(600)\n"
    with _running(python, code, tmp_path) as pid:
        assert _asleep(pid)[0].exceptions[0].line == line


@pytest.mark.parametrize("python", _pythons())
def test_the_mark_changes_with_local_variables(python: str, tmp_path: Path) -> None:
    code = f"import time{_WAIT}for step in range(1000, 3000):\n    wait(600 if step == 1500 else 0)\n"
    with _running(python, code, tmp_path) as pid:
        first = read_python(pid)[0].mark
        until(lambda: read_python(pid)[0].mark != first, "it goes on")


@pytest.mark.parametrize("python", _pythons())
def test_a_busy_process(python: str, tmp_path: Path) -> None:
    code = (
        f"import time{_WAIT}print('READY', flush=True)\n\n\n"
        "def deep(n):\n    return deep(n - 1) if n else [0] * 50\n\n\n"
        "while True:\n    try:\n        deep(40)\n        raise KeyError(1)\n    except KeyError: pass\n"
    )
    with _running(python, code, tmp_path) as pid:
        known = {"deep", "<module>", "wait"}
        for _ in range(300):
            try:
                threads = read_python(pid)
            except Unreadable:  # it changed during each attempt
                continue
            assert {frame.function for frame in threads[0].frames} <= known


def test_processes_that_cannot_be_read(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        process.stdout.read(1)
        with pytest.raises(Unreadable, match="it does not run Python"):
            read_python(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(Unreadable, match=r"has ended|not permit"):
            read_python(process.pid)
    for old in _find("3.10"):
        with (
            _running(old, f"import time{_WAIT}wait(600)\n", tmp_path) as pid,
            pytest.raises(UnknownPython, match=r"3\.10"),
        ):
            read_python(pid)
