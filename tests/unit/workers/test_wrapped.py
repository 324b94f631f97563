"""The program behind a wrapper: which process it is, and the meaning of its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rallypoint.features.wrap import process as process_module
from rallypoint.features.wrap import program as program_module
from rallypoint.features.wrap.process import Wrapped, WrappedProcess
from rallypoint.features.wrap.program import ProgramName, find_program
from rallypoint.workers.process import start_workers
from rallypoint.workers.reaper.client import Command, ReaperClient
from tests.waiting import until

RUNS = "import subprocess, sys; code = subprocess.call(sys.argv[1:]); sys.exit({end})"
CALLS = "import subprocess, sys; subprocess.call(sys.argv[1:])"
IN_THREAD = "import sys, subprocess, threading; threading.Thread(target=subprocess.call, args=(sys.argv[1:],)).start()"
EXECS = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
PROGRAM = [sys.executable, "-c", "import os, signal; os.write(1, b'%d\\n' % os.getpid()); signal.pause()"]
COPIES = "import os, signal; p = os.getpid(); os.fork() or os.write(1, b'%d\\n' % p); signal.pause()"

Start = Callable[..., tuple[WrappedProcess, int]]


@pytest.fixture
def start(reaper: ReaperClient) -> Any:
    """Starts a program behind a wrapper, a Python text; returns the process and the pid that the program prints."""
    started: list[WrappedProcess] = []

    def begin(text: str, program: Sequence[str] = PROGRAM, error_file: str = "") -> tuple[WrappedProcess, int]:
        read, write = os.pipe()
        argv = [sys.executable, "-c", text, *program]
        (handle,) = start_workers(reaper, [Command(argv, {"RANK": "0"}, (None, write, None))], os.environ)
        os.close(write)
        wrapped = Wrapped("wrapper", ProgramName.of(argv), ProgramName.of(program), {"RANK": "0"}, error_file)
        started.append(WrappedProcess(reaper, handle, wrapped))
        with os.fdopen(read) as output:
            return started[-1], int(output.readline())

    yield begin
    for process in started:
        process.signal(signal.SIGKILL)
        until(lambda process=process: process.poll() is not None, "it has ended")  # type: ignore[misc]
        process.release()


def found(process: WrappedProcess, pid: int) -> None:
    until(lambda: process.program_pid == pid, lambda: f"{process.program_pid} is {pid}")


BETWEEN = [sys.executable, "-c", CALLS]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (CALLS, PROGRAM),
        (IN_THREAD, PROGRAM),
        (EXECS, PROGRAM),
        (CALLS, [sys.executable, "-c", COPIES]),
        (f"import subprocess, sys; subprocess.call({BETWEEN!r} + sys.argv[1:])", PROGRAM),
    ],
    ids=["child", "child of a thread", "exec", "not a copy of it", "not a process with more words"],
)
def test_the_program_is_found_by_its_command_line(start: Start, text: str, program: list[str]) -> None:
    process, pid = start(text, program)
    found(process, pid)
    assert (process.pid == pid) is (text == EXECS)


def test_a_script_is_found_behind_its_interpreter(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\necho $$\nkill -STOP $$\n")
    script.chmod(0o755)
    process, pid = start(CALLS, [str(script), "--lr", "1"])
    found(process, pid)


def test_kernels_without_lists_of_children(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(path: str, *args: Any, **more: Any) -> Any:
        if path.endswith("/children"):
            raise FileNotFoundError
        return open(path, *args, **more)

    monkeypatch.setattr(program_module, "open", without, raising=False)
    process, pid = start(RUNS.format(end=0))
    found(process, pid)


def test_no_process_has_the_command_line() -> None:
    assert find_program(os.getpid(), ProgramName.of(["no-such"]), ProgramName.of(["env", "no-such"])) is None


@pytest.mark.parametrize(
    ("end", "known", "has_file", "code", "remark"),
    [
        ("0", 3, False, 3, "its wrapper wrapper exited with code 0"),
        ("1", 3, False, 3, "its wrapper wrapper exited with code 1"),
        ("3", 3, False, 3, ""),
        ("0", 0, False, 0, ""),
        ("7", 0, False, 7, "this is the exit code of its wrapper wrapper; the program behind it succeeded"),
        ("0", None, False, 0, ""),
        ("7", None, True, 7, ""),
        ("0", None, True, 1, "its wrapper wrapper exited with code 0"),
    ],
)
def test_the_exit_code_of_the_program_counts_if_known(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    end: str,
    known: int | None,
    has_file: bool,
    code: int,
    remark: str,
) -> None:
    monkeypatch.setattr(process_module, "exit_code", lambda _pid, _fd: known)
    file = tmp_path / "error.json"
    if has_file:
        file.write_text("{}")
    process, pid = start(RUNS.format(end=end), error_file=str(file))
    found(process, pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: process.poll() is not None, "the wrapper has ended")
    assert (process.exitcode, process.remark, process.fault) == (code, remark, "")
    assert process.program_pid == pid


def test_signals_reach_the_program_and_sigkill_the_wrapper(start: Start) -> None:
    process, pid = start(f"import signal; {CALLS}; signal.pause()")
    found(process, pid)
    process.signal(signal.SIGTERM)
    found(process, process.pid)
    process.signal(signal.SIGTERM)
    assert process.poll() is None
    process.signal(signal.SIGKILL)
    until(lambda: process.poll() is not None, "the wrapper has ended")


def test_signals_that_the_program_cannot_get_reach_the_wrapper(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process, pid = start(RUNS.format(end=0))
    found(process, pid)

    def refuse(_number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(process._program, "send_signal", refuse)
    process.signal(signal.SIGTERM)
    until(lambda: process.poll() == -signal.SIGTERM, "the wrapper has ended")
    os.kill(pid, signal.SIGKILL)


def test_a_program_that_ends_after_its_wrapper(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "exit_code", lambda _pid, _fd: 0)
    process, pid = start("import subprocess, sys; subprocess.Popen(sys.argv[1:])")
    until(lambda: process.poll() is None and process.held_by_debugger, "only the program runs")
    assert process.program_pid == pid
    process.forward_signal(signal.SIGTERM)
    until(lambda: process.poll() is not None, "that has ended too")
    assert (process.exitcode, process.fault) == (0, "")
