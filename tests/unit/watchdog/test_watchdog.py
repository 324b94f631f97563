"""The file timer's server, on real processes and a real pipe."""

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
    """A watchdog and what it has reported."""

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
    """Who shows its stacks has a long time for it."""
    monkeypatch.setattr(watchdog, "STACKS_TIMEOUT", TIMEOUT)


@pytest.mark.usefixtures("patient")
def test_who_is_late_leaves_its_stacks_and_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 0.2, 9) as late:
        run.until(late.ended)
        code, errors = late.ends()
        assert code == -signal.SIGABRT
        assert "hangs_here" in errors
        assert [(each.pid, each.scope, each.signal) for each in run.expired] == [(late.pid, "scope", 9)]
        assert run.expired[0].seconds <= 0.2
        assert run.expired[0].why == f"its timer 'scope' of {run.expired[0].seconds:.1f} s ran out"
        assert run.names() == [STARTED, EXPIRED, KILLED]
        reported = run.reported[-1][1]
        assert reported is not None
        assert (reported.worker_pid, reported.signal) == (late.pid, 9)


def test_who_has_no_faulthandler_is_killed_at_once(tmp_path: Path) -> None:
    with (
        running(tmp_path) as run,
        holder(HANGS.replace("faulthandler.enable()", ""), run.watchdog.path, 0.1, 9) as late,
    ):
        run.until(late.ended)
        assert late.ends() == (-signal.SIGKILL, "")


def test_stacks_that_take_too_long_cost_nobody_the_end(tmp_path: Path) -> None:
    stays = HANGS.replace("faulthandler.enable()", "signal.signal(signal.SIGABRT, lambda *_: time.sleep(1000))")
    with running(tmp_path) as run, holder(stays, run.watchdog.path, 0.1, 9) as late:
        run.until(late.ended)
        assert late.ends()[0] == -signal.SIGKILL


def test_a_release_in_time_ends_nobody(tmp_path: Path) -> None:
    text = HOLDS + "client.release('scope'); print('released', flush=True); signal.pause()"
    with running(tmp_path) as run, holder(text, run.watchdog.path, 60, 9) as good:
        good.is_up()
        assert good.says() == "released\n"
        run.clock.ahead = 100
        run.step()
        assert run.expired == []
        assert run.watchdog.wake_at() == math.inf
        assert not good.ended()


def test_a_release_counts_however_late_the_loop_comes(tmp_path: Path) -> None:
    """Both lines wait in the pipe, and the timer's time is over, when the loop looks."""
    with running(tmp_path) as run, holder("import signal; print('up', flush=True); signal.pause()") as good:
        good.is_up()
        write(run, request(good.pid, "scope", -5))
        write(run, FileTimerRequest(good.pid, "scope", -1).to_json().encode() + b"\n")
        run.step()
        run.step()
        assert run.expired == []
        assert not good.ended()


def test_a_jump_of_the_wall_clock_ends_nobody(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 60, 9) as good:
        good.is_up()
        run.step()
        for run.wall_ahead in (1e6, -1e6):
            run.step()
            assert run.expired == []
        assert 0 < run.watchdog.wake_at() - time.monotonic() <= 60


@pytest.mark.usefixtures("patient")
def test_a_signal_of_the_workers_own_choice_and_what_follows_if_it_does_not_help(tmp_path: Path) -> None:
    gentle = "import os, signal; signal.signal(15, lambda *_: os._exit(7))\n" + HANGS
    stays = "import signal; signal.signal(15, signal.SIG_IGN)\n" + HANGS
    with running(tmp_path, grace=TIMEOUT) as run, holder(gentle, run.watchdog.path, 0.1, 15) as one:
        run.until(one.ended)
        assert one.ends()[0] == 7
    with running(tmp_path, grace=0.2) as run, holder(stays, run.watchdog.path, 0.1, 15) as other:
        run.until(other.ended)
        code, errors = other.ends()
        assert code == -signal.SIGABRT
        assert "hangs_here" in errors


def test_a_signal_of_zero_is_only_reported(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 0.1, 0) as reported:
        reported.is_up()
        run.until(lambda: bool(run.expired))
        assert run.expired[0].signal == 0
        assert run.names() == [STARTED, EXPIRED]
        assert run.watchdog.wake_at() == math.inf
        assert not reported.ended()


def test_the_first_deadly_timer_of_a_process_counts(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder("import signal; print('up', flush=True); signal.pause()") as late:
        late.is_up()
        for line in (
            request(late.pid, "third", -1, 9),
            request(late.pid, "first", -3, 0),
            request(late.pid, "second", -2, 10),
            request(late.pid, "never", 1000, 9),
        ):
            write(run, line)
        run.until(lambda: late.ended() and run.watchdog.wake_at() == math.inf)
        assert late.ends()[0] == -signal.SIGUSR1
        assert [each.scope for each in run.expired] == ["second", "first", "third"]


def test_only_our_own_are_ended(tmp_path: Path) -> None:
    text = "import signal; print('up', flush=True); signal.pause()"
    with holder(text) as ours_, holder(text) as other:
        ours_.is_up()
        other.is_up()
        with running(tmp_path, lambda pid: is_descendant(pid, {ours_.pid})) as run:
            for pid in (other.pid, 1, os.getpid(), ours_.pid):
                write(run, request(pid, "scope", -1))
            run.until(ours_.ended)
            assert {each.pid for each in run.expired} == {ours_.pid}
            assert not other.ended()


def test_what_a_worker_has_started_may_hold_timers_too(tmp_path: Path) -> None:
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


def test_those_that_have_ended_are_forgotten(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        with holder(HOLDS, run.watchdog.path, 1000, 9) as brief:
            run.until(lambda: run.watchdog.client_seen)
            brief.ends()
            write(run, request(brief.pid, "late", 1000))
            run.step()
        run.clock.ahead = 2000
        run.step()
        assert run.expired == []
        assert run.watchdog.wake_at() == math.inf


def test_invalid_lines_in_the_pipe_cost_some_lines_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 600, 9) as late:
        late.is_up()
        write(run, b"\xff" * 3000)
        write(run, b"\n" + b"rubbish\n" * 1000 + b'{"version": 1, "pid": ')
        write(run, request(late.pid, "other", -1))
        run.until(late.ended)
        assert run.expired[0].scope == "other"
    assert sum("not a timer request" in line for line in caplog.messages) == watchdog._MAX_WARNINGS


def test_a_flood_holds_nobody_up(tmp_path: Path) -> None:
    """A step takes in what was there when it began, however fast somebody writes, and judges then."""
    flood = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY)\n"
        "print('up', flush=True)\n"
        "while True: os.write(fd, b'x' * 4095 + b'\\n')\n"
    )
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, 0.3, 9) as late:
        late.is_up()
        with holder(flood, run.watchdog.path) as flooding:
            flooding.is_up()
            run.until(late.ended)
            assert [each.pid for each in run.expired] == [late.pid]
            assert not flooding.ended()


def test_many_clients(tmp_path: Path) -> None:
    """Each of ten threads sets and lets go of a hundred timers; one forgets its last."""
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
[each.start() for each in threads]
[each.join() for each in threads]
signal.pause()
"""
    with running(tmp_path) as run, holder(text, run.watchdog.path) as one, holder(text, run.watchdog.path) as other:
        run.until(lambda: one.ended() and other.ended())
        assert {(each.pid, each.scope) for each in run.expired} == {(one.pid, "0.99"), (other.pid, "0.99")}


def test_after_standing_down_requests_are_read_and_nobody_is_judged(tmp_path: Path) -> None:
    with running(tmp_path) as run, holder(HANGS, run.watchdog.path, -1, 9) as late:
        late.is_up()
        run.watchdog.stop_enforcing()
        run.step()
        assert run.watchdog.client_seen
        assert run.watchdog.wake_at() == math.inf
        assert not late.ended()


def test_descriptors_of_those_that_have_ended_do_not_pile_up(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        for _ in range(5):
            with holder(HOLDS + "input()", run.watchdog.path, 1000, 9) as brief:
                brief.is_up()
                run.step()
                before = len(os.listdir("/proc/self/fd"))
                brief.finishes()
        with holder(HOLDS + "input()", run.watchdog.path, 1000, 9) as last:
            last.is_up()
            run.step()
            assert len(os.listdir("/proc/self/fd")) <= before + 1
            last.finishes()


def test_the_pipe_takes_the_place_of_a_file_and_is_for_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "timers").write_text("mktemp made it")
    with running(tmp_path) as run:
        mode = os.stat(run.watchdog.path).st_mode
        assert stat.S_ISFIFO(mode)
        assert stat.S_IMODE(mode) == 0o600


def test_a_pipe_that_took_the_place_of_ours_is_left(tmp_path: Path) -> None:
    first = Watchdog(str(tmp_path / "timers"), ours)
    second = Watchdog(str(tmp_path / "timers"), ours)
    first.close()
    assert os.path.exists(second.path)
    second.close()
    assert not os.path.exists(second.path)


@pytest.mark.parametrize("place", ["folder", "nowhere/timers"])
def test_a_place_that_cannot_hold_a_pipe(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot be created") as raised:
        Watchdog(str(tmp_path / place), ours)
    assert place in str(raised.value)


def test_the_client_without_a_server(tmp_path: Path) -> None:
    client = FileTimerClient(str(tmp_path / "timers"))
    with pytest.raises(BrokenPipeError, match="timers"):
        client.acquire("scope", 1.0)
    os.mkfifo(tmp_path / "timers")
    with pytest.raises(BrokenPipeError, match="timers"):
        client.release("scope")


def test_the_client_with_too_long_a_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="4096 bytes"):
        FileTimerClient(str(tmp_path / "timers")).acquire("s" * 5000, 1.0)


ON = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"},
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "true"},
        {"TORCHELASTIC_TIMER_FILE": "/somewhere"},
        {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0"},
    ],
)
def test_who_asks_for_nothing_gets_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    assert monitor_for(environment, str(tmp_path)) is None
    assert os.listdir(tmp_path) == []


def test_the_pipe_has_a_name_of_its_own_or_the_one_given(tmp_path: Path) -> None:
    one, other = monitor_for(ON, str(tmp_path)), monitor_for(ON, str(tmp_path))
    named = monitor_for({**ON, "TORCHELASTIC_TIMER_FILE": str(tmp_path / "mine")}, str(tmp_path))
    assert one is not None
    assert other is not None
    assert named is not None
    assert named.environment == {"TORCHELASTIC_TIMER_FILE": str(tmp_path / "mine")}
    files = [*one.files, *other.files, *named.files]
    assert sorted(files) == sorted(str(path) for path in tmp_path.iterdir())
    assert all(os.path.basename(path).startswith("watchdog_timer_") for path in files[:2])
    for each in (one, other, named):
        assert each.fds() == []
        assert each.wake_at() == math.inf
        each.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("-1", 0), ("nan", 0), ("inf", 0), ("x", 0), ("", 0)]
)
def test_how_long_a_worker_may_be_stuck(text: str, seconds: float) -> None:
    assert uninterruptible_timeout({"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": text}) == seconds
    assert uninterruptible_timeout({}) == 0


def test_a_worker_that_is_late_while_it_is_being_stopped(tmp_path: Path) -> None:
    monitor = WorkerMonitor(str(tmp_path / "timers"), 0)
    with holder(HANGS, monitor.files[0], -1, 9) as late:
        monitor.watch([late.pid])
        late.is_up()
        monitor.stop_enforcing()
        monitor.step()
        assert monitor.fds() != []
        assert monitor.wake_at() == math.inf
        assert monitor.expiry_reason(late.pid) == ""
        monitor.close()
