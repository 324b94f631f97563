"""Fixtures that start workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from tests.unit.workers.starting import Script, Up
from tests.unit.workers.test_process import guarded


@pytest.fixture
def reaper() -> Iterator[ReaperClient]:
    with guarded() as reaper:
        yield reaper


@pytest.fixture
def up(reaper: ReaperClient) -> Iterator[Up]:
    """Starts Python workers and waits until they have written `up`."""
    with ExitStack() as stack:

        def start(text: str, *, stdout: int | None = None) -> WorkerProcess:
            read, write = os.pipe()
            try:
                process = WorkerProcess(reaper, [sys.executable, "-c", text], os.environ, write, stdout)
                os.close(write)
                stack.callback(process.release)
                assert os.read(read, 2) == b"up"
            finally:
                os.close(read)
            return process

        yield start


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.process.communicate(timeout=30)
    assert script.process.returncode == 0
