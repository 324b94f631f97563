"""The file timer's server, with real processes and a real pipe."""

from __future__ import annotations

import math
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.workers import watchdog
from rallypoint.workers.timers import FileTimerClient, FileTimerRequest
from rallypoint.workers.watchdog import (
    EXPIRED,
    KILLED,
    STARTED,
    STOPPED,
    TimerExpiry,
    Watchdog,
    WorkerMonitor,
    is_descendant,
    monitor_for,
    uninterruptible_timeout,
)
from tests.unit.clocks import ShiftedClock
from tests.unit.watchdog.waiting import HANGS, HOLDS, TIMEOUT, holder, until

pytestmark = pytest.mark.process


def ours(_pid: int) -> bool:
    return True


class Run:
    """A watchdog and its reports."""

    def __init__(self, path: str, may_kill: Callable[[int], bool], grace: float) -> None:
        self.reported: list[tuple[str, FileTimerRequest | None]] = []
        self.clock = ShiftedClock()
        self.wall_ahead = 0.0
        self.watchdog = Watchdog(
            path,
            may_kill,
            run_id="job",
            grace=grace,
            report=lambda name, request: self.reported.append((name, request)),
            clock=self.clock,
            wall=lambda: time.time() + self.wall_ahead,
        )
        self.expired: list[TimerExpiry] = []

    def step(self) -> None:
        self.expired += self.watchdog.step()

    def until(self, holds: Callable[[], bool], *also: int) -> None:
        def stepped() -> bool:
            self.step()
            return holds()

        until(self.watchdog, stepped, *also)

    def names(self) -> list[str]:
        return [name for name, _ in self.reported]


@contextmanager
def running(folder: Path, may_kill: Callable[[int], bool] = ours, grace: float = 30.0) -> Iterator[Run]:
    before = set(os.listdir("/proc/self/fd"))
    run = Run(str(folder / "timers"), may_kill, grace)
    try:
        yield run
    finally:
        run.watchdog.close()
        run.watchdog.close()
    assert run.names()[-1] == STOPPED
    assert run.watchdog.fds() == []
    assert run.watchdog.step() == []
    assert not os.path.exists(run.watchdog.path)
    if HAS_PIDFDS:  # else the threads that watch processes close theirs in a moment
        assert set(os.listdir("/proc/self/fd")) == before


def request(pid: int, scope: str, seconds: float, number: int = 9) -> bytes:
    return FileTimerRequest(pid, scope, time.time() + seconds, number).to_json().encode() + b"\n"


def write(run: Run, data: bytes) -> None:
    fd = os.open(run.watchdog.path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        assert os.write(fd, data) == len(data)
    finally:
        os.close(fd)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have a long time to show their stacks."""
    monkeypatch.setattr(watchdog, "STACKS_TIMEOUT", TIMEOUT)


WAITS = "import signal; print('up', flush=True); signal.pause()"


@pytest.mark.usefixtures("patient")
def test_a_late_worker_shows_its_stacks_and_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 0.2, 9) as late:
        run.until(late.ended)
        code, errors = late.ends()
        assert code == -signal.SIGABRT
        assert "hangs_here" in errors
        (expired,) = run.expired
        assert (expired.pid, expired.scope, expired.signal) == (late.pid, "scope", 9)
        assert expired.seconds <= 0.2
        assert expired.why == f"its timer 'scope' of {expired.seconds:.1f} s ran out"
        assert run.names() == [STARTED, EXPIRED, KILLED]
        reported = run.reported[-1][1]
        assert reported is not None
        assert (reported.worker_pid, reported.signal) == (late.pid, 9)


@pytest.mark.parametrize(
    "enable", ["", "signal.signal(signal.SIGABRT, lambda *_: time.sleep(1000))"], ids=["no faulthandler", "slow stacks"]
)
def test_without_stacks_a_late_worker_is_killed(tmp_path: Path, enable: str) -> None:
    text = HANGS.replace("faulthandler.enable()", enable)
    with running(tmp_path) as run, holder(text, run.watchdog.path, 0.1, 9) as late:
        run.until(late.ended)
        assert late.ends() == (-signal.SIGKILL, "")


def test_a_release_in_time(tmp_path: Path) -> None:
    text = HOLDS + "client.release('scope'); print('released', flush=True); signal.pause()"
    with running(tmp_path) as run, holder(text, run.watchdog.path, 60, 9) as good:
        good.is_up()
        assert good.says() == "released\n"
        run.clock.ahead = 100
        run.step()
        assert run.expired == []
        assert run.watchdog.wake_at() == math.inf
        # The time is over when the loop reads both lines.
        write(run, request(good.pid, "scope", -5))
        write(run, FileTimerRequest(good.pid, "scope", -1).to_json().encode() + b"\n")
        run.step()
        run.step()
        assert run.expired == []
        assert not good.ended()


def test_jumps_of_the_wall_clock_change_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 60, 9) as good:
        good.is_up()
        run.step()
        for run.wall_ahead in (1e6, -1e6):
            run.step()
            assert run.expired == []
        assert 0 < run.watchdog.wake_at() - time.monotonic() <= 60


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("handler", "grace", "code", "stacks"),
    [("lambda *_: os._exit(7)", TIMEOUT, 7, False), ("signal.SIG_IGN", 0.2, -signal.SIGABRT, True)],
)
def test_a_signal_chosen_by_the_worker(tmp_path: Path, handler: str, grace: float, code: int, stacks: bool) -> None:
    text = f"import os, signal; signal.signal(15, {handler})\n" + HANGS
    with running(tmp_path, grace=grace) as run, holder(text, run.watchdog.path, 0.1, 15) as late:
        run.until(late.ended)
        found, errors = late.ends()
        assert (found, "hangs_here" in errors) == (code, stacks)


def test_a_signal_of_zero_is_only_reported(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 0.1, 0) as late:
        late.is_up()
        run.until(lambda: bool(run.expired))
        assert run.expired[0].signal == 0
        assert run.names() == [STARTED, EXPIRED]
        assert run.watchdog.wake_at() == math.inf
        assert not late.ended()


def test_the_first_deadly_timer_of_a_process_counts(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(WAITS) as late:
        late.is_up()
        for scope, seconds, number in (("third", -1, 9), ("first", -3, 0), ("second", -2, 10), ("never", 1000, 9)):
            write(run, request(late.pid, scope, seconds, number))
        run.until(lambda: late.ended() and run.watchdog.wake_at() == math.inf)
        assert late.ends()[0] == -signal.SIGUSR1
        assert [expiry.scope for expiry in run.expired] == ["second", "first", "third"]


def test_only_our_own_processes_are_ended(tmp_path: Path) -> None:
    with holder(WAITS) as own, holder(WAITS) as other:
        own.is_up()
        other.is_up()
        with running(tmp_path, lambda pid: is_descendant(pid, {own.pid})) as run:
            for pid in (other.pid, 1, os.getpid(), own.pid):
                write(run, request(pid, "scope", -1))
            run.until(own.ended)
            assert {expiry.pid for expiry in run.expired} == {own.pid}
            assert not other.ended()


def test_children_of_workers_may_hold_timers(tmp_path: Path) -> None:
    start = f"subprocess.run([sys.executable, '-c', {HANGS!r}, *sys.argv[1:]], start_new_session=True)"
    child = f"import subprocess, sys; {start}"
    pids: set[int] = set()
    with running(tmp_path, lambda pid: is_descendant(pid, pids)) as run:
        with holder(child + "; print('outlived', flush=True)", run.watchdog.path, 0.1, 9) as worker:
            pids.add(worker.pid)
            run.until(worker.ended, worker.handle.fileno())
            assert worker.ends()[0] == 0
        assert len(run.expired) == 1
        assert run.expired[0].pid not in pids


def test_ended_processes_are_forgotten(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with holder(HOLDS + "input()", run.watchdog.path, 1000, 9) as brief:
                brief.is_up()
                run.step()
                assert run.watchdog.client_seen
                brief.finishes()
                write(run, request(brief.pid, "late", 1000))
                run.step()
        run.clock.ahead = 2000
        run.step()
        assert run.expired == []
        assert run.watchdog.wake_at() == math.inf
        if HAS_PIDFDS:
            assert len(os.listdir("/proc/self/fd")) <= open_before


def test_invalid_lines_are_logged_a_few_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 600, 9) as late:
        late.is_up()
        write(run, b"\xff" * 3000)
        write(run, b"\n" + b"rubbish\n" * 1000 + b'{"version": 1, "pid": ')
        write(run, request(late.pid, "other", -1))
        run.until(late.ended)
        assert run.expired[0].scope == "other"
    assert sum("not a timer request" in line for line in caplog.messages) == watchdog._MAX_WARNINGS


def test_a_flood_delays_nothing(tmp_path: Path) -> None:
    """A step reads what the pipe held when it began, and then looks at the timers."""
    flood = "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY)\nprint('up', flush=True)\n"
    flood += "while True: os.write(fd, b'x' * 4095 + b'\\n')\n"
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 0.3, 9) as late:
        late.is_up()
        with holder(flood, run.watchdog.path) as flooding:
            flooding.is_up()
            run.until(late.ended)
            assert [expiry.pid for expiry in run.expired] == [late.pid]
            assert not flooding.ended()


def test_many_clients(tmp_path: Path) -> None:
    """Ten threads of two processes set and release a hundred timers each; one thread forgets its last."""
    text = """
import os, signal, sys, threading, time
from rallypoint.workers.timers import FileTimerClient
client = FileTimerClient(sys.argv[1])
def work(name):
    for number in range(100):
        client.acquire(f"{name}.{number}", time.time() + (1000 if number < 99 or name else 0.3))
        if number < 99 or name:
            client.release(f"{name}.{number}")
threads = [threading.Thread(target=work, args=(name,)) for name in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
signal.pause()
"""
    with running(tmp_path) as run, holder(text, run.watchdog.path) as one, holder(text, run.watchdog.path) as other:
        run.until(lambda: one.ended() and other.ended())
        assert {(expiry.pid, expiry.scope) for expiry in run.expired} == {(one.pid, "0.99"), (other.pid, "0.99")}


def test_the_pipe_is_private_and_replaces_a_file_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "timers").write_text("mktemp made it")
    first = Watchdog(str(tmp_path / "timers"), ours)
    mode = os.stat(first.path).st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600
    second = Watchdog(str(tmp_path / "timers"), ours)
    first.close()
    assert os.path.exists(second.path), "the pipe of another one is left"
    second.close()
    assert not os.path.exists(second.path)
    (tmp_path / "folder").mkdir()
    for place in ("folder", "nowhere/timers"):
        with pytest.raises(UserError, match=f"{place}.* cannot be created"):
            Watchdog(str(tmp_path / place), ours)


def test_errors_of_the_client(tmp_path: Path) -> None:
    client = FileTimerClient(str(tmp_path / "timers"))
    with pytest.raises(BrokenPipeError, match="timers"):
        client.acquire("scope", 1.0)
    os.mkfifo(tmp_path / "timers")
    with pytest.raises(BrokenPipeError, match="timers"):
        client.release("scope")
    with pytest.raises(RuntimeError, match="4096 bytes"):
        client.acquire("s" * 5000, 1.0)


ON = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.mark.parametrize(
    "variable",
    ["ENABLE_FILE_TIMER=0", "ENABLE_FILE_TIMER=true", "TIMER_FILE=/here", "UNINTERRUPTIBLE_STATE_TIMEOUT=0", "OTHER="],
)
def test_without_a_request_there_is_no_monitor(variable: str, tmp_path: Path) -> None:
    name, _, value = variable.partition("=")
    assert monitor_for({f"TORCHELASTIC_{name}": value}, str(tmp_path)) is None
    assert os.listdir(tmp_path) == []


def test_the_name_of_the_pipe(tmp_path: Path) -> None:
    mine = {"TORCHELASTIC_TIMER_FILE": str(tmp_path / "mine")}
    found = [monitor_for(environment, str(tmp_path)) for environment in (ON, ON, ON | mine)]
    monitors = [monitor for monitor in found if monitor is not None]
    assert monitors[2].environment == mine
    files = [file for monitor in monitors for file in monitor.files]
    assert sorted(files) == sorted(str(path) for path in tmp_path.iterdir())
    assert len(files) == 3
    assert all(os.path.basename(path).startswith("watchdog_timer_") for path in files[:2])
    for monitor in monitors:
        assert monitor.fds() == []
        assert monitor.wake_at() == math.inf
        monitor.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("-1", 0), ("nan", 0), ("inf", 0), ("x", 0), ("", 0)]
)
def test_uninterruptible_timeout(text: str, seconds: float) -> None:
    assert uninterruptible_timeout({"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": text}) == seconds
    assert uninterruptible_timeout({}) == 0


def test_after_stop_enforcing_requests_are_only_read(tmp_path: Path) -> None:
    monitor = WorkerMonitor(str(tmp_path / "timers"), 0)
    with holder(HANGS, monitor.files[0], -1, 9) as late:
        monitor.watch([late.pid])
        late.is_up()
        monitor.stop_enforcing()
        monitor.step()
        assert monitor.fds() != []
        assert monitor.wake_at() == math.inf
        assert monitor.expiry_reason(late.pid) == ""
        assert not late.ended()
        monitor.close()
