"""Workers that are functions, with each start method."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.process_table import read_stat
from rallypoint.workers.context import PContext
from rallypoint.workers.functions.context import START_METHODS
from rallypoint.workers.functions.worker import NothingReturned, Payload
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from tests.unit.workers.starting import descriptors, running, start_processes, waited
from tests.unit.workers.test_process import TIMEOUT
from tests.waiting import until

pytestmark = pytest.mark.process
every_method = pytest.mark.parametrize("method", START_METHODS)


def report(text: str, number: int) -> dict[str, Any]:
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


def echo(pipe: Any, queue: Any) -> Any:
    queue.put("up")
    return pipe.recv()


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def unreadable() -> object:
    return Unreadable()


def started(
    folder: Path, method: str, function: Callable[..., Any], *args: Sequence[Any], **env: str
) -> AbstractContextManager[PContext]:
    """One worker for each of `args`."""
    return running(folder, function, dict(enumerate(args)), env, method)


@every_method
def test_return_values_by_rank(tmp_path: Path, method: str) -> None:
    before = descriptors()
    with started(tmp_path, method, report, ("a", 1), ("b", 2), FROM_ENVS="yes") as context:
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
    assert context.poll() == result, "also after the close"
    assert descriptors() <= before
    assert "FROM_ENVS" not in os.environ


@every_method
@pytest.mark.parametrize(("function", "words"), [(boom, "ValueError: boom"), (unpicklable, "local object")])
def test_tracebacks_of_exceptions(tmp_path: Path, method: str, function: Callable[[], object], words: str) -> None:
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
def test_workers_that_end_before_they_return(tmp_path: Path, method: str, how: str, exitcode: int, words: str) -> None:
    with started(tmp_path, method, ends_by, (how,)) as context:
        failure = waited(context).failures[0]
        assert failure.exitcode == exitcode
        assert words in failure.text
        assert failure.error_file == "<N/A>"


@every_method
def test_pipes_and_queues_as_arguments(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    ours, theirs = context.Pipe()
    try:
        with started(tmp_path, method, echo, (theirs, queue)) as group:
            assert queue.get(timeout=TIMEOUT) == "up"
            ours.send("hello")
            assert waited(group).return_values == {0: "hello"}
    finally:
        for end in (ours, theirs, queue):
            end.close()


def test_objects_that_cannot_be_pickled(tmp_path: Path) -> None:
    before, lock = descriptors(), threading.Lock()
    for method in ("spawn", "forkserver"):
        with pytest.raises(UserError, match="the function report and its arguments cannot be passed to a new process"):
            start_processes(report, {0: (lock,)}, {0: {}}, DefaultLogsSpecs(str(tmp_path)), start_method=method)
    with pytest.raises(UserError, match=r"start_method='thread' is not .*; use one of spawn, fork, forkserver"):
        start_processes(boom, {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path)), start_method="thread")
    assert descriptors() <= before
    with started(tmp_path, "fork", lambda given: given is lock, (lock,)) as context:
        assert waited(context).return_values == {0: True}
    with started(tmp_path, "spawn", unreadable, ()) as context:
        assert "what it returned cannot be read here: ValueError" in waited(context).failures[0].text


@every_method
def test_children_of_workers_end_with_them(tmp_path: Path, method: str) -> None:
    with started(tmp_path, method, spawns_and_sleeps, ()) as context:
        path = Path(context.stdouts[0])
        until(lambda: len(path.read_text().split()) == 3, "two pids were printed")
        pids = [int(word) for word in path.read_text().split() if word.isdigit()]
        context.close()
        assert [pid for pid in pids if (stat := read_stat(pid)) and stat.state not in "ZX"] == []


def test_a_forked_worker_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    found: list[Any] = []

    def start() -> None:
        specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
        found.append(start_processes(echo, {0: (theirs, queue)}, {0: {}}, specs, start_method="fork"))

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
        for end in (ours, theirs, queue):
            end.close()


def test_a_payload_without_a_footer() -> None:
    payload = Payload()
    for close in (payload.close, payload.close):
        with pytest.raises(NothingReturned):
            payload.result()
        close()
