"""How workers end, on real processes."""

from __future__ import annotations

import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.kernel import until_readable
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.workers import stop as module
from rallypoint.workers import stop as stop_module
from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import SWEEP_GRACE_PERIOD, NoSweep, Stop, Sweep, run_to_end
from tests.unit.workers.test_process import TIMEOUT, ends, parent_of
from tests.unit.workers.tracing import TRACEABLE, traced
from tests.waiting import until

if TYPE_CHECKING:
    from rallypoint.workers.stop import StoppableProcess

pytestmark = pytest.mark.process

DEAF = "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'up'); signal.pause()"
STAYS = "import time\nwhile True: time.sleep(0.02)"
"""Until a handler ends it: a signal right before a pause would not end that."""
GENTLE = f"import os, signal; signal.signal(15, lambda *_: os._exit(0)); os.write(1, b'up'); {STAYS}"


Up = Callable[..., WorkerProcess]


@pytest.fixture
def up(reaper: ReaperClient) -> Iterator[Up]:
    """Starts processes that have said that they are ready."""
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


LONG = 30.0
"""Seconds that no test waits for: processes that do as they should need far less, also on a busy machine."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who shows its stacks, writes a file, or is left by a worker, has a long time for it."""
    monkeypatch.setattr(module, "STACKS_TIMEOUT", LONG)
    monkeypatch.setattr(module, "SWEEP_GRACE_PERIOD", LONG)
    monkeypatch.setattr(stop_module, "DETECTION_TIME", LONG)
    monkeypatch.setattr(stop_module, "QUIET_TIME", 4.0)


def stop_of(
    processes: Sequence[StoppableProcess],
    sweep: NoSweep,
    death_sig: int,
    grace: float,
    limit: float = 0.0,
    *,
    sent: bool = False,
) -> Stop:
    return Stop(dict(enumerate(processes)), sweep, death_sig, grace, limit, sent=sent)


def stopped(reaper: ReaperClient, processes: list[WorkerProcess], death_sig: int, grace: float) -> None:
    """Stop them, to the end."""
    stop = stop_of(processes, Sweep(reaper, processes), death_sig, grace)
    run_to_end(stop)
    assert stop.step()
    assert stop.fds() == []
    assert stop.wake_at() == math.inf


def readable(*fds: int) -> bool:
    """Whether one of them is, within the timeout of the test."""
    return bool(select.select(fds, [], [], TIMEOUT)[0])


def readable_now(fd: int) -> bool:
    """Whether it is readable without waiting."""
    return bool(select.select([fd], [], [], 0)[0])


class Stuck:
    """A process that the kernel does not let go, as after a disk has gone: nothing ends it."""

    pid = program_pid = 4_000_000
    held_by_debugger = signalled = False

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.got: list[int] = []
        self.exitcode: int | None = None

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> int | None:
        return None

    def signal(self, number: int) -> None:
        self.got.append(number)


@pytest.mark.usefixtures("patient")
def test_whose_stacks_nobody_has_seen_shows_them_instead_of_ending_at_once(reaper: ReaperClient, up: Up) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as told:
        hangs = "def here(): os.write(1, b'up'); signal.pause()\nhere()"
        shows = up(f"import faulthandler, os, signal; faulthandler.enable()\n{hangs}", stdout=write)
        os.close(write)
        mute, gentle = up(f"import faulthandler, os, signal; faulthandler.disable()\n{hangs}"), up(GENTLE)
        for process in (shows, mute, gentle):
            process.stacks_wanted = lambda: True
        stopped(reaper, [shows, mute, gentle], signal.SIGTERM, 30)
        assert [process.poll() for process in (shows, mute, gentle)] == [-signal.SIGABRT, -signal.SIGTERM, 0]
        assert b"in here" in told.read()


def test_who_has_the_signal_already_is_not_sent_it_again(reaper: ReaperClient, up: Up) -> None:
    gentle = up(GENTLE)
    stop = stop_of([gentle], Sweep(reaper, [gentle]), signal.SIGTERM, LONG, sent=True)
    assert gentle.signalled
    assert not readable_now(gentle.fileno())
    gentle.forward_signal(signal.SIGTERM)
    run_to_end(stop)
    assert gentle.poll() == 0


class Late(Stuck):
    """A process that ends between two looks: its descriptor is readable before it is found to have ended."""

    pid = 4_000_001

    def __init__(self, fd: int, looks: int) -> None:
        super().__init__(fd)
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
        stop = stop_of([Stuck(quiet), Late(ended, looks)], NoSweep(), signal.SIGKILL, 0.2)
        steps = 0
        while not stop.step():
            steps += 1
            until_readable(stop.fds(), stop.wake_at() - SYSTEM_CLOCK.monotonic())
        assert steps < 20
    finally:
        for fd in (quiet, far, ended, other):
            os.close(fd)


def test_a_sweep_that_was_given_up_kills_nothing_later_and_costs_no_later_stop_its_grace(
    reaper: ReaperClient, up: Up, caplog: pytest.LogCaptureFixture
) -> None:
    held = up(TRACEABLE + DEAF)
    with traced(held.pid) as tracer:
        stopped(reaper, [held], signal.SIGKILL, 0.1)
        assert f"Process {held.pid} has not ended even after SIGKILL" in caplog.text
        assert f"Process {reaper.pid} " not in caplog.text
        assert f"Process {parent_of(held.pid)} " not in caplog.text
        tracer.holds()

        next_round = WorkerProcess(reaper, ["sleep", "0.5"], os.environ)
        assert ends(next_round) == 0, "nobody has killed it"
        deaf = up(DEAF)
        before = SYSTEM_CLOCK.monotonic()
        stopped(reaper, [deaf], signal.SIGTERM, 0.1)
        assert deaf.poll() == -signal.SIGKILL
        stopped(reaper, [], signal.SIGTERM, 2 * LONG)
        assert SYSTEM_CLOCK.monotonic() - before < LONG
        tracer.lets_go()
    next_round.release()
    assert ends(held) == -signal.SIGKILL


@pytest.mark.skipif(not HAS_PIDFDS, reason="without pidfds, the end shows when the debugger has let go")
def test_a_worker_that_is_held_by_a_debugger_is_waited_for_and_keeps_the_processor_free(
    reaper: ReaperClient, up: Up
) -> None:
    process = up(TRACEABLE + GENTLE)
    with traced(process.pid) as tracer:
        stop = stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 600)
        tracer.holds()
        assert not stop.step()
        assert process.held_by_debugger
        assert process.fileno() not in stop.fds()
        assert stop.wake_at() <= SYSTEM_CLOCK.monotonic() + 1
        tracer.lets_go()
        run_to_end(stop)
        assert process.poll() == 0


def test_whatever_the_sweep_comes_to_the_workers_are_killed(up: Up) -> None:
    class Refused(NoSweep):
        def begin(self, seconds: float = 0.0, spared: Collection[int] = ()) -> None:
            raise PermissionError("/proc cannot be read")

    process = up(DEAF)
    with pytest.raises(PermissionError):
        stop_of([process], Refused(), signal.SIGKILL, 30)
    assert ends(process) == -signal.SIGKILL


def test_a_reaper_that_is_known_to_be_lost_wakes_whoever_waits_for_the_sweep(reaper: ReaperClient, up: Up) -> None:
    process = up(DEAF)
    parent = parent_of(process.pid)  # now: the sweep may have ended the worker before the next line
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
    """A worker with a helper in a session of its own, and what gives all that the helper writes until it ends."""
    read, write = os.pipe()
    ready = "" if "b'up'" in ending else "os.write(1, b'up')\n"
    process = up(HELPING.format(heeds=heeds) + ready + ending, stdout=write)
    os.close(write)

    def told() -> bytes:
        with os.fdopen(read, "rb") as file:
            return file.read()

    return process, told


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ending", ["os._exit(0)", "os._exit(3)", "signal.pause()", DEAF])
def test_what_a_worker_has_left_is_asked_before_it_is_killed(reaper: ReaperClient, up: Up, ending: str) -> None:
    process, told = left_by(up, HEEDS, ending)
    if "exit" in ending:
        ends(process)
    before = SYSTEM_CLOCK.monotonic()
    stopped(reaper, [process], signal.SIGTERM, 0.1)
    assert told() == b"flushed"
    assert SYSTEM_CLOCK.monotonic() - before < LONG, "it is waited for until it ends, and no longer"


def test_what_does_not_heed_is_killed_after_its_second(reaper: ReaperClient, up: Up) -> None:
    process, told = left_by(up, "signal.SIG_IGN", "os._exit(0)")
    ends(process)
    before = SYSTEM_CLOCK.monotonic()
    stopped(reaper, [process], signal.SIGTERM, 2 * LONG)
    assert SWEEP_GRACE_PERIOD <= SYSTEM_CLOCK.monotonic() - before < LONG
    assert told() == b""


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("hurried", ["from the first", "while it waits"])
def test_nobody_is_asked_by_one_who_is_in_a_hurry(reaper: ReaperClient, up: Up, hurried: str) -> None:
    process, told = left_by(up, "signal.SIG_IGN", "signal.pause()")
    before = SYSTEM_CLOCK.monotonic()
    if hurried == "from the first":
        stopped(reaper, [process], signal.SIGKILL, 30)
    else:
        stop = stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 30)
        ends(process)
        assert not stop.step()
        stop.kill_now()
        run_to_end(stop)
    assert SYSTEM_CLOCK.monotonic() - before < LONG
    assert told() == b""


@pytest.mark.usefixtures("patient")
def test_where_nothing_is_left_nothing_is_waited_for(reaper: ReaperClient, up: Up) -> None:
    process = up("import os; os.write(1, b'up')")
    ends(process)
    before = SYSTEM_CLOCK.monotonic()
    stopped(reaper, [process], signal.SIGTERM, LONG)
    assert SYSTEM_CLOCK.monotonic() - before < LONG


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
@pytest.mark.parametrize("who", ["who would die of the signal", "who saves when it is asked"])
def test_a_checkpoint_that_is_being_written_is_not_cut(
    reaper: ReaperClient, up: Up, tmp_path: Path, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    path = tmp_path / "model.pt"
    if who == "who would die of the signal":
        text = SAVING.format(path=str(path), started="_ or os.write(1, b'up')") + "save(); signal.pause()"
    else:
        text = SAVING.format(path=str(path), started="pass")
        text += f"signal.signal(15, save); os.write(1, b'up'); {STAYS}"
    process = up(text)
    before = SYSTEM_CLOCK.monotonic()
    # It has three seconds to begin with its save, which takes five.
    stop = stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 3.0, 2 * LONG)
    run_to_end(stop)
    assert path.stat().st_size == 10_000_000
    assert SYSTEM_CLOCK.monotonic() - before < LONG
    told = (
        rf"process {process.pid} is writing {re.escape(str(path))}; it will be stopped when that is done, or in \d+ s"
    )
    assert len(re.findall(told, caplog.text)) == 1


def test_whoever_writes_without_end_is_stopped_all_the_same(reaper: ReaperClient, up: Up, tmp_path: Path) -> None:
    text = f"import os, time\nfile = open({str(tmp_path / 'data')!r}, 'wb')\nos.write(1, b'up')\n"
    process = up(text + "while True: file.write(bytes(100_000)); file.flush(); time.sleep(0.005)")
    before = SYSTEM_CLOCK.monotonic()
    run_to_end(stop_of([process], Sweep(reaper, [process]), signal.SIGTERM, 0.1, 1.0))
    assert process.poll() == -signal.SIGTERM
    assert 1.0 <= SYSTEM_CLOCK.monotonic() - before < LONG


def test_those_who_write_nothing_are_asked_while_another_writes(reaper: ReaperClient, up: Up, tmp_path: Path) -> None:
    text = SAVING.format(path=str(tmp_path / "model.pt"), started="_ or os.write(1, b'up')")
    writer, other = up(text + "save(); signal.pause()"), up(GENTLE)
    stop = stop_of([writer, other], Sweep(reaper, [writer, other]), signal.SIGTERM, 30)
    assert other.signalled
    assert not writer.signalled
    run_to_end(stop)
    assert (writer.poll(), other.poll()) == (-signal.SIGTERM, 0)


def test_who_has_not_ended_is_named_with_the_time_that_is_left(
    reaper: ReaperClient, up: Up, caplog: pytest.LogCaptureFixture
) -> None:
    process = up(DEAF)
    stopped(reaper, [process], signal.SIGTERM, 5.9)
    assert (
        len(re.findall(rf"worker process {process.pid} has not ended; it will be sent SIGKILL in [1-4] s", caplog.text))
        == 1
    )
