"""The file timer's server on a thread."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rallypoint.compat.timers import FileTimerServer
from rallypoint.workers import watchdog
from rallypoint.workers.timers import FileTimerClient, FileTimerRequest
from tests.unit.watchdog.waiting import HANGS, TIMEOUT, holder

pytestmark = pytest.mark.process


def test_it_ends_who_is_late_and_stays_alive_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STACKS_TIMEOUT", TIMEOUT)
    reported: list[str] = []
    stopped = threading.Event()

    def note(name: str, _request: FileTimerRequest | None) -> None:
        reported.append(name)
        if name == "kill worker process":
            stopped.set()

    path = str(tmp_path / "timers")
    server = FileTimerServer(path, "job", log_event=note)
    server.start()
    server.start()
    try:
        with holder(HANGS, path, 0.1, 9) as late:
            assert stopped.wait(TIMEOUT)
            code, errors = late.ends()
            assert code < 0
            assert "hangs_here" in errors
    finally:
        server.stop()
        server.stop()
    assert reported == ["watchdog started", "timer expired", "kill worker process", "watchdog stopped"]
    assert not os.path.exists(path)


def test_it_never_ends_itself(tmp_path: Path) -> None:
    path = str(tmp_path / "timers")
    server = FileTimerServer(path, "job")
    server.start()
    try:
        assert abs(server.get_last_progress_time() - time.time()) < TIMEOUT
        FileTimerClient(path).acquire("own", time.time() - 1)
        with holder(HANGS, path, 0.1, 9) as late:  # its end shows that the other was dealt with
            assert late.ends()[0] < 0
        assert abs(server.get_last_progress_time() - time.time()) < TIMEOUT
    finally:
        server.stop()


def test_an_error_of_the_reporter_saves_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_name: str, _request: FileTimerRequest | None) -> None:
        raise ValueError("a handler of the user's")

    path = str(tmp_path / "timers")
    server = FileTimerServer(path, "job", log_event=broken)
    server.start()
    try:
        with holder(HANGS, path, 0.1, 9) as late:
            assert late.ends()[0] < 0
    finally:
        server.stop()
    reported = [line for line in caplog.messages if "could not be reported" in line]
    assert len(reported) == 4
