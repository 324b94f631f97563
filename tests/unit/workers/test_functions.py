"""Workers that are functions, with each start method."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.process_table import read_stat
from rallypoint.workers.context import RunProcsResult
from rallypoint.workers.functions.context import START_METHODS, FunctionContext
from rallypoint.workers.functions.worker import NothingReturned, Payload
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from tests.unit.workers.starting import start_processes
from tests.unit.workers.test_process import TIMEOUT
from tests.waiting import until

pytestmark = pytest.mark.process


every_method = pytest.mark.parametrize("method", START_METHODS)


def seen(text: str, number: int) -> dict[str, Any]:
    print(f"out {text}")
    os.write(2, f"err {text}\n".encode())
    stdin = os.read(0, 10)
    stat = read_stat(os.getpid())
    assert stat is not None
    return {
        "sum": number + 1,
        "variable": os.environ["FROM_ENVS"],
        "path": os.environ["PATH"],
        "stdin": stdin,
        "leads its session": stat.session == stat.pid,
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def boom() -> None:
    raise ValueError("boom")


def unpicklable() -> object:
    return lambda: None


def ends_by(how: str) -> str:
    if how == "os._exit(0)":
        os._exit(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    return how


def spawns_and_sleeps() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600 & setsid sleep 600 & echo $!; wait"], env={})
    os.write(1, f"spawned {child.pid}\n".encode())
    time.sleep(600)


def waits_for(pipe: Any, queue: Any) -> Any:
    queue.put("up")
    return pipe.recv()


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def unreadable() -> object:
    return Unreadable()


@contextmanager
def started(
    folder: Path, method: str, function: Callable[..., Any], *args: Sequence[Any], **env: str
) -> Iterator[FunctionContext]:
    """One worker for each of `args`, with both streams in files."""
    specs = DefaultLogsSpecs(str(folder), redirects=Std.ALL)
    context = start_processes(
        function, dict(enumerate(args)), dict.fromkeys(range(len(args)), env), specs, start_method=method
    )
    assert isinstance(context, FunctionContext)
    try:
        yield context
    finally:
        context.close(signal.SIGKILL)


def waited(context: FunctionContext) -> RunProcsResult:
    result = context.wait(TIMEOUT)
    assert result is not None
    return result


def descriptors() -> set[str]:
    """Those of this process, without the one that libffi keeps on itself from the first callback on."""
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this list
            if "libffi" not in os.readlink(f"/proc/self/fd/{number}"):
                found.add(number)
    return found


@every_method
def test_values_by_rank(tmp_path: Path, method: str) -> None:
    before = descriptors()
    with started(tmp_path, method, seen, ("a", 1), ("b", 2), FROM_ENVS="yes") as context:
        result = waited(context)
        assert not result.is_failed()
        expected = {
            "variable": "yes",
            "path": os.environ["PATH"],
            "stdin": b"",
            "leads its session": True,
            "terminate": True,
            "mask": [],
        }
        assert result.return_values == {0: {"sum": 2, **expected}, 1: {"sum": 3, **expected}}
        assert [Path(result.stdouts[rank]).read_text() for rank in (0, 1)] == ["out a\n", "out b\n"]
        assert [Path(result.stderrs[rank]).read_text() for rank in (0, 1)] == ["err a\n", "err b\n"]
        assert context.poll() == result
    assert context.poll() == result, "also after the end"
    assert descriptors() <= before
    assert "FROM_ENVS" not in os.environ


@every_method
@pytest.mark.parametrize(("function", "words"), [(boom, "ValueError: boom"), (unpicklable, "local object")])
def test_an_exception_is_told_with_its_traceback(
    tmp_path: Path, method: str, function: Callable[[], object], words: str
) -> None:
    error = tmp_path / "error.json"
    with started(tmp_path, method, function, (), TORCHELASTIC_ERROR_FILE=str(error)) as context:
        failure = waited(context).failures[0]
        assert failure.exitcode == 1
        assert words in failure.text
        assert words in failure.callstack
        assert words in Path(context.stderrs[0]).read_text()
        assert json.loads(Path(failure.error_file).read_text())["message"]["extraInfo"]["py_callstack"]


@every_method
@pytest.mark.parametrize(
    ("how", "exitcode", "words"),
    [("SIGKILL", -signal.SIGKILL, "SIGKILL"), ("os._exit(0)", 0, "before its function returned")],
)
def test_a_worker_that_dies_before_it_returns(tmp_path: Path, method: str, how: str, exitcode: int, words: str) -> None:
    with started(tmp_path, method, ends_by, (how,)) as context:
        failure = waited(context).failures[0]
        assert failure.exitcode == exitcode
        assert words in failure.text
        assert failure.error_file == "<N/A>"


def test_a_value_that_cannot_be_read_here(tmp_path: Path) -> None:
    with started(tmp_path, "spawn", unreadable, ()) as context:
        failure = waited(context).failures[0]
        assert "what it returned cannot be read here: ValueError" in failure.text


@every_method
def test_pipes_and_queues_are_handed_over(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    ours, theirs = context.Pipe()
    try:
        with started(tmp_path, method, waits_for, (theirs, queue)) as group:
            assert queue.get(timeout=TIMEOUT) == "up"
            ours.send("hello")
            assert waited(group).return_values == {0: "hello"}
    finally:
        for each in (ours, theirs, queue):
            each.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_cannot_be_pickled_is_refused_before_anything_starts(tmp_path: Path, method: str) -> None:
    before = descriptors()
    with pytest.raises(UserError, match="the function seen and its arguments cannot be passed to a new process"):
        start_processes(seen, {0: (threading.Lock(),)}, {0: {}}, DefaultLogsSpecs(str(tmp_path)), start_method=method)
    assert descriptors() <= before


def test_what_cannot_be_pickled_can_be_forked(tmp_path: Path) -> None:
    lock = threading.Lock()
    with started(tmp_path, "fork", lambda given: given is lock, (lock,)) as context:
        assert waited(context).return_values == {0: True}


def test_an_unknown_start_method(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="start_method='thread' is not a start method; use one of spawn, fork, forkserver"
    ):
        start_processes(boom, {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path)), start_method="thread")


@every_method
def test_what_a_worker_has_spawned_goes_with_it(tmp_path: Path, method: str) -> None:
    with started(tmp_path, method, spawns_and_sleeps, ()) as context:
        path = Path(context.stdouts[0])
        until(lambda: len(path.read_text().split()) == 3, "two pids are told")
        pids = [int(word) for word in path.read_text().split() if word.isdigit()]
        context.close()
        for pid in pids:
            stat = read_stat(pid)
            assert stat is None or stat.state in "ZX", f"{pid} runs"


def test_a_forked_worker_that_another_thread_started(tmp_path: Path) -> None:
    """It outlives that thread, and hears of nothing but its agent's end."""
    found: list[Any] = []

    def start() -> None:
        specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
        found.append(start_processes(waits_for, {0: (theirs, queue)}, {0: {}}, specs, start_method="fork"))

    ours, theirs = multiprocessing.Pipe()
    queue = multiprocessing.get_context("fork").SimpleQueue()
    thread = threading.Thread(target=start)
    thread.start()
    thread.join(TIMEOUT)
    try:
        assert queue.get() == "up"
        ours.send(1)
        assert waited(found[0]).return_values == {0: 1}
    finally:
        found[0].close(signal.SIGKILL)
        for each in (ours, theirs, queue):
            each.close()


def test_a_payload_without_a_footer() -> None:
    payload = Payload()
    try:
        with pytest.raises(NothingReturned):
            payload.result()
    finally:
        payload.close()
    with pytest.raises(NothingReturned):
        payload.result()
