"""The file timer's protocol between torch's side and ours: torch's client and our server, our client and torch's."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.workers.timers import FileTimerRequest
from rallypoint.workers.watchdog import Watchdog
from tests.conformance.record import Record
from tests.processes import completed
from tests.unit.watchdog.waiting import TIMEOUT, Holder, holder, until

pytestmark = pytest.mark.torch

TORCH_CLIENT = """
import signal, sys, time
import torch.distributed.elastic.timer as timer
"""
OUR_CLIENT = """
import signal, sys, time
import rallypoint.workers.timers as timer
"""
GOOD_THEN_LATE = """
timer.configure(timer.FileTimerClient(sys.argv[1]))
for number in range(50):
    with timer.expires(after=60, scope=f"good {number}"):
        pass
print("up", flush=True)
with timer.expires(after=0.3, scope="late"):
    signal.pause()
"""
GOOD = """
timer.configure(timer.FileTimerClient(sys.argv[1]))
with timer.expires(after=60):
    time.sleep(0.1)
with timer.expires(after=60):
    pass
print("up", flush=True)
sys.stdin.read()
"""
TORCH_SERVER = """
import signal, sys, time
import torch.distributed.elastic.timer as timer

def told(name, request):
    print(name, "" if request is None else request.to_json(), flush=True)

signal.signal(signal.SIGUSR1, lambda *_: print("the server got the signal too", flush=True))
server = timer.FileTimerServer(sys.argv[1], "job", max_interval=0.1, log_event=told)
server.start()
sys.stdin.read()
server.stop()
"""


@contextmanager
def our_server(folder: Path) -> Iterator[Watchdog]:
    """Our server, and the check that nothing of it is left."""
    watchdog = Watchdog(str(folder / "timers"), lambda _pid: True)
    try:
        yield watchdog
    finally:
        watchdog.close()
    assert os.listdir(folder) == []


def test_torch_clients_are_enforced_by_our_server(tmp_path: Path) -> None:
    expired = []
    with our_server(tmp_path) as watchdog, holder(TORCH_CLIENT + GOOD_THEN_LATE, watchdog.path) as late:

        def ended() -> bool:
            expired.extend(watchdog.step())
            return late.ended()

        until(watchdog, ended, late.handle.fileno())
        assert late.ends()[0] == -signal.SIGKILL
        assert [(each.pid, each.scope, each.signal) for each in expired] == [(late.pid, "late", 9)]


def test_torch_clients_that_are_in_time_are_left_alone(tmp_path: Path) -> None:
    with our_server(tmp_path) as watchdog, holder(TORCH_CLIENT + GOOD, watchdog.path) as good:
        good.is_up()
        assert watchdog.step() == []
        assert watchdog.client_seen
        assert not good.ended()


@contextmanager
def torch_server(path: str) -> Iterator[Holder]:
    """Torch's server in a process of its own: when it ends a worker, it sends itself the same signal."""
    with holder(TORCH_SERVER, path) as server:
        assert server.says() == "watchdog started \n"
        yield server


def test_torch_server_enforces_either_client_and_leaves_alone_who_is_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "timers")
    with torch_server(path) as server:
        for client in (OUR_CLIENT, TORCH_CLIENT):
            with holder(client + GOOD, path) as good:
                good.is_up()
                assert good.finishes() == (0, "")
        for client in (OUR_CLIENT, TORCH_CLIENT):
            text = client + GOOD_THEN_LATE.replace("sys.argv[1])", "sys.argv[1], signal.SIGUSR1)")
            with holder(text, path) as late:
                assert late.ends()[0] == -signal.SIGUSR1
                for name in ("timer expired", "kill worker process"):
                    line = server.says()
                    assert line.startswith(name)
                    request = json.loads(line.removeprefix(name))
                    assert (request["pid"], request["scope_id"], request["signal"]) == (
                        late.pid,
                        "late",
                        signal.SIGUSR1,
                    )
                assert server.says() == "the server got the signal too\n"
        assert server.finishes()[0] == 0


def test_both_write_the_same_line(record: Record) -> None:
    """Run apart: torch is not imported by the tests themselves."""
    text = (
        "import sys\n"
        "from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest\n"
        "print(FileTimerRequest(7, 'a \\u00e9 \"{', 1.25, 9).to_json())\n"
        "print(FileTimerRequest(7, 'a', -1).to_json())\n"
    )
    command = [sys.executable, "-c", text]

    def torchs() -> list[str]:
        done = completed(command, check=True, timeout=TIMEOUT)
        return done.stdout.splitlines()

    ours = [FileTimerRequest(7, 'a é "{', 1.25, 9).to_json(), FileTimerRequest(7, "a", -1).to_json()]
    assert record.answer("watchdog", "lines", text, torchs) == ours


LOCAL = """
import multiprocessing, os, signal, sys, time

def late(queue, client):
    sys.argv[1:] = [client]
    exec(f"from {client} import LocalTimerClient", globals())
    client = LocalTimerClient(queue)
    client.acquire("good", time.time() + 60)
    client.release("good")
    client.acquire("late", time.time() + 0.3)
    signal.pause()

if __name__ == "__main__":
    exec(f"from {sys.argv[1]} import LocalTimerServer")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    server = LocalTimerServer(queue, max_interval=0.1)
    server.start()
    worker = context.Process(target=late, args=(queue, sys.argv[2]))
    worker.start()
    worker.join()  # the test has a limit
    server.stop()
    print(worker.exitcode)
"""


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ("rallypoint.compat.elastic.timer", "torch.distributed.elastic.timer"),
        ("torch.distributed.elastic.timer", "rallypoint.compat.elastic.timer"),
    ],
)
def test_the_queue_timer_of_one_with_the_other(tmp_path: Path, server: str, client: str) -> None:
    script = tmp_path / "local.py"
    script.write_text(LOCAL)
    done = completed([sys.executable, str(script), server, client], timeout=2 * TIMEOUT)
    assert done.stdout == "-9\n", done.stderr
