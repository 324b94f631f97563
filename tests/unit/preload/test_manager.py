"""Zygotes under a real reaper: what they start, what they survive, and what follows when they are gone."""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.features.preload import client
from rallypoint.features.preload.client import PreloadManager
from rallypoint.workers.process import AdoptedProcess, WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import Sweep
from tests.processes import completed
from tests.unit.clocks import HandClock
from tests.unit.workers.test_process import TIMEOUT, ends, parent_of

pytestmark = pytest.mark.process


@contextmanager
def preloading(
    reaper: ReaperClient,
    folder: Path,
    modules: str = "decimal",
    clock: HandClock | None = None,
    ready: bool = True,
    own: Sequence[str] = ("RANK",),
) -> Iterator[PreloadManager]:
    environ = {name: value for name, value in os.environ.items() if name not in own}
    found = PreloadManager(modules.split(","), command(folder), environ, own, 2, clock or SYSTEM_CLOCK)
    found.ensure_zygote(reaper)
    try:
        if ready:
            until(found, lambda: not found.importing)
        yield found
    finally:
        found.close()


def command(folder: Path, text: str = "") -> list[str]:
    script = folder / "script.py"
    if text or not script.exists():
        script.write_text(text)
    return [sys.executable, "-u", str(script)]


def until(found: PreloadManager, holds: Callable[[], bool]) -> None:
    """Do what the agent's loop does until something holds."""
    deadline = SYSTEM_CLOCK.monotonic() + TIMEOUT
    while not holds():
        assert SYSTEM_CLOCK.monotonic() < deadline
        select.select(found.fds(), [], [], 0.05)
        found.step()


def copies(found: PreloadManager) -> list[int]:
    """The processes that wait to become workers."""
    return [] if found._zygote is None else [each.handle.pid for each in found._zygote.copies]


def start(found: PreloadManager, reaper: ReaperClient, folder: Path, text: str) -> AdoptedProcess:
    argv = command(folder, text)
    started = found.start(argv, os.environ, None, None, ())
    assert started is not None
    return AdoptedProcess(reaper, started)


def test_a_sweep_spares_the_zygote_and_nothing_else(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path) as found:
        zygote = found.pid
        for _ in range(3):
            process = start(found, reaper, tmp_path, "import os, signal\nos.fork()\nos.setsid\nsignal.pause()")
            sweep = Sweep(reaper, [process])
            sweep.begin()
            while not sweep.done():
                select.select(sweep.fds(), [], [], TIMEOUT)
            assert ends(process) == -signal.SIGKILL
            process.release()
            assert found.pid == zygote
    assert zygote is not None


def test_a_sweep_is_not_cut_short_by_a_zygote_that_is_started(reaper: ReaperClient, tmp_path: Path) -> None:
    """One that has died is followed by another at any time, also while the workers are being swept."""
    process = WorkerProcess(reaper, command(tmp_path, "import signal\nsignal.pause()"), os.environ)
    stopped = parent_of(process.pid)
    os.kill(stopped, signal.SIGSTOP)  # so that it hears of both at once
    sweep = Sweep(reaper, [process])
    sweep.begin()
    one = waiting_for(reaper)

    def go_on() -> None:
        deadline = SYSTEM_CLOCK.monotonic() + TIMEOUT
        while waiting_for(reaper) == one and SYSTEM_CLOCK.monotonic() < deadline:
            os.sched_yield()
        os.kill(stopped, signal.SIGCONT)

    beside = threading.Thread(target=go_on)
    beside.start()
    with preloading(reaper, tmp_path, ready=False) as found:
        beside.join()
        while not sweep.done():
            select.select(sweep.fds(), [], [], TIMEOUT)
        assert process.poll() == -signal.SIGKILL
        until(found, lambda: not found.importing)
        start(found, reaper, tmp_path, "pass").release()
    process.release()


def waiting_for(reaper: ReaperClient) -> int:
    """How much was sent to a reaper that it has not read."""
    return int.from_bytes(fcntl.ioctl(reaper._link.socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_imports_that_take_the_ends_of_children(reaper: ReaperClient, tmp_path: Path) -> None:
    (tmp_path / "takes.py").write_text("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n")
    with preloading(reaper, tmp_path, "takes") as found:
        argv = command(tmp_path, "raise SystemExit(4)")
        for started in [found.start(argv, os.environ, None, None, ()) for _ in range(10)]:
            assert started is not None
            process = AdoptedProcess(reaper, started)
            assert ends(process) == 4
            process.release()


def test_a_worker_with_processors_of_its_own_must_know_how_many_threads(
    reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) == 1:
        pytest.skip("there is one processor, so that none are left out")
    with preloading(reaper, tmp_path) as found:
        assert found.start(command(tmp_path), os.environ, None, None, ours[:1]) is None
        assert "OMP_NUM_THREADS is not set" in caplog.text
        start(found, reaper, tmp_path, "pass").release()


def test_a_dead_one_is_followed_until_three_were_of_no_use(
    reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with preloading(reaper, tmp_path) as found:
        for number in range(3):
            pid = found.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(found, lambda pid=pid: found.pid != pid)  # type: ignore[misc]
            assert not found.importing, "only the first start waits"
            assert (found.pid is None) == (number == 2)
        assert "so were 2 before it" in caplog.text
        assert len([record for record in caplog.records if "start without preloading" in record.message]) == 3


def test_one_that_does_not_answer_costs_its_timeout_and_then_workers_start_without_preloading(
    reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "REFILL_DELAY", math.inf)
    with preloading(reaper, tmp_path) as found:
        pid = found.pid
        assert pid is not None
        until(found, lambda: len(copies(found)) == 2)
        for _ in range(2):
            start(found, reaper, tmp_path, "pass").release()
        monkeypatch.setattr(client, "FORK_TIMEOUT", 0.1)
        os.kill(pid, signal.SIGSTOP)
        assert found.start(command(tmp_path), os.environ, None, None, ()) is None
        assert "did not answer within" in caplog.text
        assert found.pid != pid


def forked_with(found: PreloadManager, folder: Path, *names: str) -> list[bool]:
    """Which of these modules a worker finds there."""
    path = folder / "names"
    os.mkfifo(path)
    text = f"import sys\nopen({str(path)!r}, 'w').write(str([name in sys.modules for name in {names!r}]))"
    started = found.start(command(folder, text), os.environ, None, None, ())
    assert started is not None
    started.close()
    shown = path.read_text()
    path.unlink()
    return [each == "True" for each in shown.strip("[]").split(", ")]


def test_a_module_that_makes_it_unforkable_is_left_out(
    reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reads.py").write_text("import os\nos.environ.get('RANK')\n")
    (tmp_path / "stays.py").write_text(
        "import _thread, threading\n_thread.start_new_thread(threading.Event().wait, ())\n"
    )
    with preloading(reaper, tmp_path, "reads,decimal,stays", ready=False) as found:
        pids = set()
        while not forks(found):
            pids.add(found.pid)
            assert len(pids) < 4
            until(found, lambda: found.pid not in pids or forks(found))
        assert forked_with(found, tmp_path, "reads", "stays", "decimal") == [False, False, True]
        assert len(pids) == 3
    told = [record.message for record in caplog.records if "start without preloading" in record.message]
    assert "reads cannot be preloaded: reads.py:2 reads RANK while" in told[0]
    assert told[0].endswith("and each worker has its own; this lasts until decimal, stays is preloaded without it")
    assert "stays cannot be preloaded: it starts 1 thread that stays: " in told[1]
    assert len(told) == 2


def forks(found: PreloadManager) -> bool:
    return found._zygote is not None and found._zygote.phase is client.ZygotePhase.READY


def test_what_torch_imports_later_is_imported_with_it(
    reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever has brought it; and where that must not be, torch alone."""
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    (torch / "_dynamo.py").write_text("")
    (tmp_path / "trainer.py").write_text("import os, torch\n")
    with preloading(reaper, tmp_path, "trainer") as found:
        assert forked_with(found, tmp_path, "trainer", "torch", "torch._dynamo") == [True, True, True]
    (torch / "_dynamo.py").write_text("import os\nos.environ.get('RANK')\n")
    with preloading(reaper, tmp_path, "trainer", ready=False) as found:
        until(found, lambda: forks(found))
        assert forked_with(found, tmp_path, "trainer", "torch", "torch._dynamo") == [True, True, False]
    (torch / "_dynamo.py").unlink()
    (tmp_path / "trainer.py").write_text("import os, torch\nos.environ.get('RANK')\n")
    with preloading(reaper, tmp_path, "trainer", ready=False) as found:
        until(found, lambda: forks(found))
        assert forked_with(found, tmp_path, "trainer", "torch", "torch._dynamo") == [False, True, False]
    assert "this lasts until torch is preloaded without it" in caplog.text


def test_one_that_no_worker_can_be_forked_from_is_ended(
    reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with preloading(reaper, tmp_path) as found:
        zygote = found.pid
        assert zygote is not None
        environ = {**os.environ, "PYTHONPATH": "/elsewhere"}
        for number in range(3):
            assert found.pid == zygote, f"{number} of 3 workers"
            assert found.start(command(tmp_path), environ, None, None, ()) is None
        assert found.pid is None
        found.ensure_zygote(reaper)
        assert found.pid is None
    assert "the interpreter reads PYTHONPATH" in caplog.text


def waits(found: PreloadManager) -> bool:
    return found.importing


def test_how_long_the_first_start_waits(reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    clock = HandClock()
    with preloading(reaper, tmp_path, "slow", clock, ready=False) as found:
        assert waits(found)
        assert found.wake_at() == client.IMPORT_TIMEOUT
        clock.now = client.IMPORT_TIMEOUT
        found.step()
        assert not waits(found)
        assert found.start(command(tmp_path), os.environ, None, None, ()) is None
        assert "slow is not imported yet and has made no progress for 20 s" in caplog.text
        clock.now = 0.0
        assert not waits(found)


def test_it_waits_on_while_one_module_after_the_other_is_imported(reaper: ReaperClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(
        f"open({str(tmp_path / 'fifo')!r}, 'w').write('here')\nimport time\ntime.sleep(600)\n"
    )
    clock = HandClock()
    clock.now = 15.0
    with preloading(reaper, tmp_path, "json,slow", clock, ready=False) as found:
        assert found.wake_at() == 15.0 + client.IMPORT_TIMEOUT
        assert (tmp_path / "fifo").read_text() == "here"
        clock.now = 34.0
        until(found, lambda: found.wake_at() == 34.0 + client.IMPORT_TIMEOUT)
        clock.now = 53.0
        found.step()
        assert waits(found)


def test_arguments_and_descriptors_of_a_worker(
    reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with preloading(reaper, tmp_path) as found:
        argv = [
            *command(tmp_path, "import os, sys\nprint(sys.argv[1:], os.environ['X'], sorted(os.sched_getaffinity(0)))"),
            "é",
            "",
        ]
        cpus = [min(os.sched_getaffinity(0))]
        reading, writing = os.pipe()
        started = found.start(argv, {**os.environ, "X": "y" * 300_000}, writing, None, cpus)
        os.close(writing)
        assert started is not None
        with open(reading, encoding="utf-8") as file:
            assert file.read() == f"['é', ''] {'y' * 300_000} {cpus}\n"
        process = AdoptedProcess(reaper, started)
        assert ends(process) == 0
        process.release()


def test_nothing_of_a_zygote_is_imported_where_none_is_asked_for() -> None:
    code = "import sys, rallypoint.agent.launch, rallypoint.workers.context\nprint(*sys.modules)"
    shown = completed([sys.executable, "-c", code], check=True)
    assert not [name for name in shown.stdout.split() if "preload" in name]
