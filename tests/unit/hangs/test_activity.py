"""The activity of workers' real processes: a file that grows, and a child that computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.features.hangs.activity import Activity, ActivityProbe
from tests.unit.workers.starting import Script
from tests.waiting import until

pytestmark = pytest.mark.process


class Worker(Script):
    """A script whose activity is looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.probe = ActivityProbe([self.pid])

    def do(self, line: str) -> Activity:
        """Execute a line, and look at the activity."""
        self.run(line)
        return self.probe.look()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.process.kill()
    worker.process.communicate()


def test_growing_files(worker: Worker) -> None:
    first = worker.do("file = open('ckpt', 'wb', buffering=0)").grown
    assert worker.do("file.write(b'a line of a log')").grown == first
    grown = worker.do("file.write(bytes(1 << 20))").grown
    assert grown != first
    assert worker.do("pass").grown == grown
    assert worker.do("file.close()").grown == grown
    # The file of a child:
    code = "file = open('ckpt', 'wb', buffering=0); print(); input(); file.write(bytes(1 << 20)); print(); input()"
    pipes = "bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE"
    worker.do(f"child = subprocess.Popen([sys.executable, '-uc', {code!r}], {pipes})")
    first = worker.do("child.stdout.readline()").grown
    assert worker.do("child.stdin.write(b'x\\n'); child.stdout.readline()").grown != first
    worker.do("child.communicate(b'x')")


def test_busy_children_count_and_busy_workers_do_not(worker: Worker) -> None:
    assert not worker.do("sum(range(10 ** 7))").is_busy
    worker.do("child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])")
    until(lambda: worker.probe.look().is_busy, "the child computes")
    worker.do("child.kill(); child.wait()")
    worker.probe.look()
    assert not worker.do("sum(range(10 ** 7))").is_busy
