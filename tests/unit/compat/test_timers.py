"""Torch's timers: over a queue of `multiprocessing`, and over a file."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest

from rallypoint.compat.timers import (
    FileTimerServer,
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    RequestQueue,
    TimerServer,
)
from rallypoint.workers import watchdog
from rallypoint.workers.timers import FileTimerClient, FileTimerRequest, TimerRequest, expires
from tests.unit.watchdog.waiting import HANGS, TIMEOUT, holder

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def queue() -> Iterator[Queue[Any]]:
    made = SPAWN.Queue()
    yield made
    made.close()
    made.join_thread()


def late(queue: Queue[Any], seconds: float) -> None:
    """A worker that hangs with a timer."""
    with expires(seconds, "late", LocalTimerClient(queue)):
        signal.pause()


def in_time(queue: Queue[Any]) -> None:
    """A worker that is never late."""
    for number in range(20):
        with expires(60, str(number), LocalTimerClient(queue)):
            pass


def test_late_workers_are_killed_before_the_interval_ends(queue: Queue[Any]) -> None:
    server = LocalTimerServer(queue, max_interval=1000)
    server.start()
    server.start()
    workers = [SPAWN.Process(target=late, args=(queue, 0.1)), SPAWN.Process(target=in_time, args=(queue,))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(TIMEOUT)
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0]
    finally:
        server.stop()
        server.stop()
        for worker in workers:
            worker.kill()
            worker.join()
            worker.close()


def test_requests_of_a_queue(queue: Queue[Any]) -> None:
    requests = MultiprocessingRequestQueue(queue)
    assert requests.get(3, 0.0) == []
    sent = [TimerRequest(os.getpid(), str(number), 5.0) for number in range(3)]
    for request in sent:
        queue.put(request)
    assert requests.get(2, TIMEOUT) == sent[:2]
    assert requests.get(1, TIMEOUT) == sent[2:]

    def send() -> None:
        for request in sent:
            queue.put(request)

    late = threading.Timer(0.1, send)
    late.start()
    assert requests.get(3, TIMEOUT) == sent
    late.join()
    queue.put(sent[0])
    requests.wake()
    assert requests.get(5, TIMEOUT) == sent[:1]


def test_the_timers_of_a_server(queue: Queue[Any]) -> None:
    server, now = LocalTimerServer(queue), time.time()
    early, later = TimerRequest(5, "early", now - 1), TimerRequest(5, "later", now + 1000)
    server.register_timers([later, early, TimerRequest(6, "gone", now - 1), TimerRequest(6, "gone", -1)])
    assert server.get_expired_timers(now) == {5: [early]}
    assert server.get_expired_timers(now + 2000) == {5: [early, later]}
    server.clear_timers({5})
    assert server.get_expired_timers(now + 2000) == {}


@pytest.mark.parametrize("worker", [0, -1, 1, "7", None])
def test_only_single_processes_are_killed(queue: Queue[Any], worker: object) -> None:
    assert not LocalTimerServer(queue)._reap_worker(worker)


class Given(RequestQueue):
    """A queue with one batch of requests."""

    def __init__(self, requests: list[TimerRequest]) -> None:
        self.requests = requests

    def size(self) -> int:
        return len(self.requests)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        taken, self.requests = self.requests[:size], self.requests[size:]
        return taken


class Own(TimerServer):
    """A user's server."""

    def __init__(self, requests: list[TimerRequest], reaps: dict[str, bool | Exception]) -> None:
        super().__init__(Given(requests), 0.01)
        self.timers: dict[str, TimerRequest] = {}
        self.reaps = reaps
        self.cleared: list[set[Any]] = []

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self.timers.update({request.worker_id: request for request in timer_requests})

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.cleared.append(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        return {worker: [timer] for worker, timer in self.timers.items() if timer.expiration_time <= deadline}

    def _reap_worker(self, worker_id: Any) -> bool:
        result = self.reaps[worker_id]
        if isinstance(result, Exception):
            raise result
        return result


def test_a_user_s_own_server() -> None:
    requests = [TimerRequest("gone", "s", 1), TimerRequest("stays", "s", 1), TimerRequest("breaks", "s", 1)]
    server = Own([*requests, TimerRequest("good", "s", math.inf)], {"gone": True, "stays": False, "breaks": OSError()})
    server._run_watchdog()
    assert server.cleared == [{"gone", "breaks"}]
    server.start()
    server.stop()


# The server of file timers on a thread


@contextmanager
def serving(
    path: str, log_event: Callable[[str, FileTimerRequest | None], None] | None = None
) -> Iterator[FileTimerServer]:
    server = FileTimerServer(path, "job", log_event=log_event)
    server.start()
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.stop()


@pytest.mark.process
def test_the_file_server_kills_late_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STACKS_TIMEOUT", TIMEOUT)
    reported: list[str] = []
    stopped = threading.Event()

    def note(name: str, _request: FileTimerRequest | None) -> None:
        reported.append(name)
        if name == "kill worker process":
            stopped.set()

    path = str(tmp_path / "timers")
    with serving(path, note), holder(HANGS, path, 0.1, 9) as late:
        assert stopped.wait(TIMEOUT)
        code, errors = late.ends()
        assert code < 0
        assert "hangs_here" in errors
    assert reported == ["watchdog started", "timer expired", "kill worker process", "watchdog stopped"]
    assert not os.path.exists(path)


@pytest.mark.process
def test_the_file_server_survives_its_own_timers_and_errors_of_the_reporter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_name: str, _request: FileTimerRequest | None) -> None:
        raise ValueError("a handler of the user's")

    path = str(tmp_path / "timers")
    with serving(path, broken) as server:
        assert abs(server.get_last_progress_time() - time.time()) < TIMEOUT
        FileTimerClient(path).acquire("own", time.time() - 1)
        with holder(HANGS, path, 0.1, 9) as late:  # its end shows that the other was handled
            assert late.ends()[0] < 0
        assert abs(server.get_last_progress_time() - time.time()) < TIMEOUT
    assert sum("could not be reported" in line for line in caplog.messages) >= 4
