"""What the processes of workers do, of real ones: a file that grows, and a child that computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.features.hangs.activity import Activity, ActivityProbe
from tests.waiting import until

pytestmark = pytest.mark.process

WORKER = """
import subprocess, sys
spin = "while True: pass"
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""


class Worker:
    """A Python process that does what it is told, line by line."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.probe = ActivityProbe([self.process.pid])

    def do(self, line: str) -> Activity:
        """Have it done, and look."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        return self.probe.look()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.process.kill()
    worker.process.communicate()


def test_a_file_that_grows_is_seen(worker: Worker) -> None:
    first = worker.do("file = open('ckpt', 'wb', buffering=0)").grown
    assert worker.do("file.write(b'a line of a log')").grown == first
    grown = worker.do("file.write(bytes(1 << 20))").grown
    assert grown != first
    assert worker.do("pass").grown == grown
    assert worker.do("file.close()").grown == grown


def test_a_file_that_a_child_writes_is_seen(worker: Worker) -> None:
    code = "file = open('ckpt', 'wb', buffering=0); print(); input(); file.write(bytes(1 << 20)); print(); input()"
    pipes = "bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE"
    worker.do(f"child = subprocess.Popen([sys.executable, '-uc', {code!r}], {pipes})")
    first = worker.do("child.stdout.readline()").grown
    assert worker.do("child.stdin.write(b'x\\n'); child.stdout.readline()").grown != first
    worker.do("child.communicate(b'x')")


def test_a_child_that_computes_is_seen_and_a_worker_that_does_is_not(worker: Worker) -> None:
    assert not worker.do("sum(range(10 ** 7))").is_busy
    worker.do("child = subprocess.Popen([sys.executable, '-c', spin])")
    until(lambda: worker.probe.look().is_busy, "the child computes")
    worker.do("child.kill(); child.wait()")
    worker.probe.look()
    assert not worker.do("sum(range(10 ** 7))").is_busy
