"""How workers end, with real processes."""

from __future__ import annotations

import math
import os
import re
import select
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.kernel import until_readable
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.workers import stop as module
from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import SWEEP_GRACE_PERIOD, NoSweep, Stop, Sweep, run_to_end
from tests.unit.workers.starting import Up
from tests.unit.workers.test_process import TIMEOUT, ends, parent_of
from tests.unit.workers.test_stages import Process
from tests.unit.workers.tracing import TRACEABLE, traced
from tests.waiting import until

if TYPE_CHECKING:
    from rallypoint.workers.stop import StoppableProcess

pytestmark = pytest.mark.process

DEAF = "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'up'); signal.pause()"
STAYS = "import time\nwhile True: time.sleep(0.02)"
"""Sleeps until a handler ends it: a signal right before `pause` would not end the pause."""
GENTLE = f"import os, signal; signal.signal(15, lambda *_: os._exit(0)); os.write(1, b'up'); {STAYS}"
LONG = 30.0
"""Seconds; far more than processes should need on a busy machine."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have a long time to show their stacks, to write a file, and to end after their worker."""
    monkeypatch.setattr(module, "STACKS_TIMEOUT", LONG)
    monkeypatch.setattr(module, "SWEEP_GRACE_PERIOD", LONG)
    monkeypatch.setattr(module, "DETECTION_TIME", LONG)
    monkeypatch.setattr(module, "QUIET_TIME", 4.0)


def stop_of(
    processes: Sequence[StoppableProcess], sweep: NoSweep, death_sig: int, grace: float, limit: float = 0.0
) -> Stop:
    return Stop(dict(enumerate(processes)), sweep, death_sig, grace, limit)


def stopped(reaper: ReaperClient, processes: list[WorkerProcess], death_sig: int, grace: float) -> None:
    """Stop them, to the end."""
    stop = stop_of(processes, Sweep(reaper, processes), death_sig, grace)
    run_to_end(stop)
    assert stop.step()
    assert stop.fds() == []
    assert stop.wake_at() == math.inf


def readable(*fds: int, timeout: float = TIMEOUT) -> bool:
    return bool(select.select(fds, [], [], timeout)[0])


@contextmanager
def less_than(seconds: float) -> Iterator[None]:
    before = SYSTEM_CLOCK.monotonic()
    yield
    assert SYSTEM_CLOCK.monotonic() - before < seconds


@pytest.mark.usefixtures("patient")
def test_workers_without_known_stacks_show_them(reaper: ReaperClient, up: Up) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as output:
        hangs = "def here(): os.write(1, b'up'); signal.pause()\nhere()"
        shows = up(f"import faulthandler, os, signal; faulthandler.enable()\n{hangs}", stdout=write)
        os.close(write)
        mute, gentle = up(f"import faulthandler, os, signal; faulthandler.disable()\n{hangs}"), up(GENTLE)
        for process in (shows, mute, gentle):
            process.stacks_wanted = lambda: True
        stopped(reaper, [shows, mute, gentle], signal.SIGTERM, 30)
        assert [process.poll() for process in (shows, mute, gentle)] == [-signal.SIGABRT, -signal.SIGTERM, 0]
        assert b"in here" in output.read()


def test_a_signal_that_workers_have_received_is_not_repeated(reaper: ReaperClient, up: Up) -> None:
    gentle = up(GENTLE)
    stop = Stop({0: gentle}, Sweep(reaper, [gentle]), signal.SIGTERM, LONG, sent=True)
    assert gentle.signalled
    assert not readable(gentle.fileno(), timeout=0)
    gentle.forward_signal(signal.SIGTERM)
    run_to_end(stop)
    assert gentle.poll() == 0


class Late(Process):
    """A process that ends between two looks: its descriptor is readable before `poll` finds the end."""

    def __init__(self, fd: int, looks: int) -> None:
        super().__init__(4_000_001, fd)
        self._looks = looks

    def poll(self) -> int | None:
        self._looks -= 1
        self.exitcode = 0 if self._looks < 0 else None
        return self.exitcode


@pytest.mark.parametrize("looks", range(2, 6))
def test_an_end_between_two_looks_does_not_keep_the_processor_busy(looks: int) -> None:
    (quiet, far), (ended, other) = os.pipe(), os.pipe()
    try:
        os.write(other, b"x")
        stop = stop_of([Process(4_000_000, quiet), Late(ended, looks)], NoSweep(), signal.SIGKILL, 0.2)
        steps = 0
        while not stop.step():
            steps += 1
            until_readable(stop.fds(), stop.wake_at() - SYSTEM_CLOCK.monotonic())
        assert steps < 20
    finally:
        for fd in (quiet, far, ended, other):
            os.close(fd)


def test_abandoned_sweeps_kill_no_later_worker(reaper: ReaperClient, up: Up, caplog: pytest.LogCaptureFixture) -> None:
    held = up(TRACEABLE + DEAF)
    with traced(held.pid) as tracer:
        stopped(reaper, [held], signal.SIGKILL, 0.1)
        assert f"Process {held.pid} has not ended even after SIGKILL" in caplog.text
        assert f"Process {reaper.pid} " not in caplog.text
        assert f"Process {parent_of(held.pid)} " not in caplog.text
        tracer.wait_until_held()
        later = WorkerProcess(reaper, ["sleep", "0.5"], os.environ)
        assert ends(later) == 0
        deaf = up(DEAF)
        with less_than(LONG):
            stopped(reaper, [deaf], signal.SIGTERM, 0.1)
            assert deaf.poll() == -signal.SIGKILL
            stopped(reaper, [], signal.SIGTERM, 2 * LONG)
        tracer.let_go()
    later.release()
    assert ends(held) == -signal.SIGKILL


@pytest.mark.skipif(not HAS_PIDFDS, reason="without pidfds, the end shows when the debugger has let go")
def test_a_stop_waits_for_a_worker_under_a_debugger(reaper: ReaperClient, up: Up) -> None:
    process = up(TRACEABLE + GENTLE)
    with traced(process.pid) as tracer:
        stop = stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 600)
        tracer.wait_until_held()
        assert not stop.step()
        assert process.held_by_debugger
        assert process.fileno() not in stop.fds()
        assert stop.wake_at() <= SYSTEM_CLOCK.monotonic() + 1
        tracer.let_go()
        run_to_end(stop)
        assert process.poll() == 0


def test_workers_are_killed_if_the_sweep_fails(up: Up) -> None:
    class Refused(NoSweep):
        def begin(self, seconds: float = 0.0, spared: Collection[int] = ()) -> None:
            raise PermissionError("/proc cannot be read")

    process = up(DEAF)
    with pytest.raises(PermissionError):
        stop_of([process], Refused(), signal.SIGKILL, 30)
    assert ends(process) == -signal.SIGKILL


def test_a_lost_reaper_wakes_the_sweep(reaper: ReaperClient, up: Up) -> None:
    process = up(DEAF)
    parent = parent_of(process.pid)  # the sweep may end the worker
    sweep = Sweep(reaper, [process])
    sweep.begin()
    os.kill(parent, signal.SIGKILL)
    until(lambda: reaper.lost)
    assert readable(*sweep.fds())
    assert sweep.done()


HELPING = """
import os, signal, subprocess, sys
helper = "import os, signal, time; signal.signal(15, {heeds}); os.write(1, b'x'); "
helper += "[time.sleep(0.02) for _ in range(9999)]"
end = subprocess.Popen([sys.executable, "-c", helper], stdout=subprocess.PIPE, start_new_session=True)
end.stdout.read(1)
"""
HEEDS = "lambda *_: (os.write(2, b'flushed'), os._exit(0))"


def left_by(up: Up, heeds: str, ending: str) -> tuple[WorkerProcess, Callable[[], bytes]]:
    """A worker with a helper in another session, and a function that reads the output of the helper to its end."""
    read, write = os.pipe()
    ready = "" if "b'up'" in ending else "os.write(1, b'up')\n"
    process = up(HELPING.format(heeds=heeds) + ready + ending, stdout=write)
    os.close(write)

    def output() -> bytes:
        with os.fdopen(read, "rb") as file:
            return file.read()

    return process, output


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ending", ["os._exit(0)", "os._exit(3)", "signal.pause()", DEAF])
def test_children_of_workers_are_asked_before_they_are_killed(reaper: ReaperClient, up: Up, ending: str) -> None:
    process, output = left_by(up, HEEDS, ending)
    if "exit" in ending:
        ends(process)
    with less_than(LONG):
        stopped(reaper, [process], signal.SIGTERM, 0.1)
        assert output() == b"flushed"


def test_children_that_do_not_react_are_killed_after_their_grace_period(reaper: ReaperClient, up: Up) -> None:
    process, output = left_by(up, "signal.SIG_IGN", "os._exit(0)")
    ends(process)
    before = SYSTEM_CLOCK.monotonic()
    stopped(reaper, [process], signal.SIGTERM, 2 * LONG)
    assert SWEEP_GRACE_PERIOD <= SYSTEM_CLOCK.monotonic() - before < LONG
    assert output() == b""


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("killed", ["at first", "during the grace period"])
def test_children_of_killed_workers_are_killed_at_once(reaper: ReaperClient, up: Up, killed: str) -> None:
    process, output = left_by(up, "signal.SIG_IGN", "signal.pause()")
    with less_than(LONG):
        if killed == "at first":
            stopped(reaper, [process], signal.SIGKILL, 30)
        else:
            stop = stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 30)
            ends(process)
            assert not stop.step()
            stop.kill_now()
            run_to_end(stop)
        assert output() == b""
    childless = up("import os; os.write(1, b'up')")
    ends(childless)
    with less_than(LONG):
        stopped(reaper, [childless], signal.SIGTERM, LONG)


SAVING = """
import os, signal, time
def save(*_):
    with open({path!r}, "wb") as file:
        for _ in range(100):
            file.write(bytes(100_000))
            file.flush()
            {started}
            time.sleep(0.05)
"""


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("saves", ["before the signal", "at the signal"])
def test_a_stop_waits_for_a_checkpoint(
    reaper: ReaperClient, up: Up, tmp_path: Path, caplog: pytest.LogCaptureFixture, saves: str
) -> None:
    path = tmp_path / "model.pt"
    if saves == "before the signal":
        text = SAVING.format(path=str(path), started="_ or os.write(1, b'up')") + "save(); signal.pause()"
    else:
        text = SAVING.format(path=str(path), started="pass")
        text += f"signal.signal(15, save); os.write(1, b'up'); {STAYS}"
    process = up(text)
    with less_than(LONG):
        # It has three seconds to begin its save, which takes five.
        run_to_end(stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 3.0, 2 * LONG))
    assert path.stat().st_size == 10_000_000
    line = (
        rf"process {process.pid} is writing {re.escape(str(path))}; it will be stopped when that is done, or in \d+ s"
    )
    assert len(re.findall(line, caplog.text)) == 1


def test_a_worker_that_always_writes_is_stopped_at_the_limit(reaper: ReaperClient, up: Up, tmp_path: Path) -> None:
    text = f"import os, time\nfile = open({str(tmp_path / 'data')!r}, 'wb')\nos.write(1, b'up')\n"
    process = up(text + "while True: file.write(bytes(100_000)); file.flush(); time.sleep(0.005)")
    before = SYSTEM_CLOCK.monotonic()
    run_to_end(stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 0.1, 1.0))
    assert process.poll() == -signal.SIGTERM
    assert 1.0 <= SYSTEM_CLOCK.monotonic() - before < LONG


def test_other_workers_are_asked_while_one_writes(reaper: ReaperClient, up: Up, tmp_path: Path) -> None:
    text = SAVING.format(path=str(tmp_path / "model.pt"), started="_ or os.write(1, b'up')")
    writer, other = up(text + "save(); signal.pause()"), up(GENTLE)
    stop = stop_of([writer, other], Sweep(reaper, [writer, other]), signal.SIGTERM, 30)
    assert other.signalled
    assert not writer.signalled
    run_to_end(stop)
    assert (writer.poll(), other.poll()) == (-signal.SIGTERM, 0)


def test_the_time_of_a_slow_worker_is_logged(reaper: ReaperClient, up: Up, caplog: pytest.LogCaptureFixture) -> None:
    process = up(DEAF)
    stopped(reaper, [process], signal.SIGTERM, 5.9)
    assert (
        len(re.findall(rf"worker process {process.pid} has not ended; it will be sent SIGKILL in [1-4] s", caplog.text))
        == 1
    )
