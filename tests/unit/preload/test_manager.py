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
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.process_handle import ProcessHandle
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
    argv: Sequence[str] = (),
) -> Iterator[PreloadManager]:
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    argv = list(argv) or command(folder)
    with closing(PreloadManager(modules.split(","), argv, environ, ["RANK"], 2, clock or SYSTEM_CLOCK)) as found:
        found.ensure_zygote(reaper)
        if ready:
            until(found, lambda: not found.importing)
        yield found


def command(folder: Path, text: str = "") -> list[str]:
    script = folder / "script.py"
    if text or not script.exists():
        script.write_text(text)
    return [sys.executable, "-u", str(script)]


def until(found: PreloadManager, holds: Callable[[], bool]) -> None:
    """Run the agent's loop until something holds."""
    deadline = SYSTEM_CLOCK.monotonic() + TIMEOUT
    while not holds():
        assert SYSTEM_CLOCK.monotonic() < deadline
        select.select(found.fds(), [], [], 0.05)
        found.step()


def copies(found: PreloadManager) -> list[int]:
    """The pids of the copies that wait to become workers."""
    return [] if found._zygote is None else [copy.handle.pid for copy in found._zygote.copies]


def fork(found: PreloadManager, folder: Path, text: str = "") -> ProcessHandle | None:
    return found.start(command(folder, text), os.environ, None, None, ())


def start(found: PreloadManager, reaper: ReaperClient, folder: Path, text: str) -> AdoptedProcess:
    started = fork(found, folder, text)
    assert started is not None
    return AdoptedProcess(reaper, started)


def sweep(reaper: ReaperClient, process: AdoptedProcess | WorkerProcess) -> None:
    """Sweep what a worker left, to the end."""
    begun = Sweep(reaper, [process])
    begun.begin()
    finish(begun)


def finish(sweep: Sweep) -> None:
    while not sweep.done():
        select.select(sweep.fds(), [], [], TIMEOUT)


def test_sweeps_spare_only_the_zygote(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path) as found:
        zygote = found.pid
        assert zygote is not None
        for _ in range(3):
            process = start(found, reaper, tmp_path, "import os, signal\nos.fork()\nos.setsid\nsignal.pause()")
            sweep(reaper, process)
            assert ends(process) == -signal.SIGKILL
            process.release()
            assert found.pid == zygote


def test_a_new_zygote_ends_no_sweep(reaper: ReaperClient, tmp_path: Path) -> None:
    """A zygote that has died is replaced at any time, also during a sweep."""
    process = WorkerProcess(reaper, command(tmp_path, "import signal\nsignal.pause()"), os.environ)
    stopped = parent_of(process.pid)
    os.kill(stopped, signal.SIGSTOP)  # so that it receives both requests at once
    swept = Sweep(reaper, [process])
    swept.begin()
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
        finish(swept)
        assert process.poll() == -signal.SIGKILL
        until(found, lambda: not found.importing)
        start(found, reaper, tmp_path, "pass").release()
    process.release()


def waiting_for(reaper: ReaperClient) -> int:
    """The number of bytes that a reaper has not read yet."""
    return int.from_bytes(fcntl.ioctl(reaper._link.socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_imports_that_ignore_sigchld(reaper: ReaperClient, tmp_path: Path) -> None:
    (tmp_path / "takes.py").write_text("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n")
    with preloading(reaper, tmp_path, "takes") as found:
        command(tmp_path, "raise SystemExit(4)")
        for started in [fork(found, tmp_path) for _ in range(10)]:
            assert started is not None
            process = AdoptedProcess(reaper, started)
            assert ends(process) == 4
            process.release()


def test_workers_with_their_own_processors_need_omp_num_threads(
    reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) == 1:
        pytest.skip("there is only one processor")
    with preloading(reaper, tmp_path) as found:
        assert found.start(command(tmp_path), os.environ, None, None, ours[:1]) is None
        assert "OMP_NUM_THREADS is not set" in caplog.text
        start(found, reaper, tmp_path, "pass").release()


def test_dead_zygotes_are_replaced(reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_zygote_that_hangs_is_replaced(
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
        assert fork(found, tmp_path) is None
        assert "did not answer within" in caplog.text
        assert found.pid != pid


def forked_with(found: PreloadManager, folder: Path, *names: str) -> list[bool]:
    """Which of these modules a forked worker has."""
    until(found, lambda: forks(found))
    path = folder / "names"
    os.mkfifo(path)
    text = f"import sys\nopen({str(path)!r}, 'w').write(' '.join(str(name in sys.modules) for name in {names!r}))"
    started = fork(found, folder, text)
    assert started is not None
    started.close()
    shown = path.read_text()
    path.unlink()
    return [word == "True" for word in shown.split()]


def test_unforkable_modules(reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    first, second = [record.message for record in caplog.records if "start without preloading" in record.message]
    assert "reads cannot be preloaded: reads.py:2 reads RANK while" in first
    assert first.endswith("and each worker has its own; this lasts until decimal, stays is preloaded without it")
    assert "stays cannot be preloaded: it starts 1 thread that stays: " in second


def forks(found: PreloadManager) -> bool:
    return found._zygote is not None and found._zygote.phase is client.ZygotePhase.READY


READS = "import os\nos.environ.get('RANK')\n"


def test_lazy_modules_of_torch(reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if another module imports torch; without them, or torch alone, if the others cannot be forked."""
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    for dynamo, trainer, imported in (
        ("", "import torch\n", [True, True, True]),
        (READS, "import torch\n", [True, True, False]),
        (None, "import torch\n" + READS, [False, True, False]),
    ):
        if dynamo is None:
            (torch / "_dynamo.py").unlink()
        else:
            (torch / "_dynamo.py").write_text(dynamo)
        (tmp_path / "trainer.py").write_text(trainer)
        with preloading(reaper, tmp_path, "trainer", ready=False) as found:
            assert forked_with(found, tmp_path, "trainer", "torch", "torch._dynamo") == imported
    assert "this lasts until torch is preloaded without it" in caplog.text


def test_a_zygote_that_fits_no_worker(reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def is_importing(found: PreloadManager) -> bool:
    return found.importing


def test_the_wait_of_the_first_start(reaper: ReaperClient, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    clock = HandClock()
    with preloading(reaper, tmp_path, "slow", clock, ready=False) as found:
        assert is_importing(found)
        assert found.wake_at() == client.IMPORT_TIMEOUT
        clock.now = client.IMPORT_TIMEOUT
        found.step()
        assert not is_importing(found)
        assert fork(found, tmp_path) is None
        assert "slow is not imported yet and has made no progress for 20 s" in caplog.text
        clock.now = 0.0
        assert not is_importing(found)


def test_each_imported_module_extends_the_wait(reaper: ReaperClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(
        f"open({str(tmp_path / 'fifo')!r}, 'w').write('here')\nimport time\ntime.sleep(600)\n"
    )
    clock = HandClock(15.0)
    with preloading(reaper, tmp_path, "json,slow", clock, ready=False) as found:
        assert found.wake_at() == 15.0 + client.IMPORT_TIMEOUT
        assert (tmp_path / "fifo").read_text() == "here"
        clock.now = 34.0
        until(found, lambda: found.wake_at() == 34.0 + client.IMPORT_TIMEOUT)
        clock.now = 53.0
        found.step()
        assert found.importing


def test_arguments_and_descriptors(reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = "import os, sys\nprint(sys.argv[1:], os.environ['X'], sorted(os.sched_getaffinity(0)))"
    with preloading(reaper, tmp_path) as found:
        cpus = [min(os.sched_getaffinity(0))]
        reading, writing = os.pipe()
        argv = [*command(tmp_path, text), "é", ""]
        started = found.start(argv, {**os.environ, "X": "y" * 300_000}, writing, None, cpus)
        os.close(writing)
        assert started is not None
        with open(reading, encoding="utf-8") as file:
            assert file.read() == f"['é', ''] {'y' * 300_000} {cpus}\n"
        process = AdoptedProcess(reaper, started)
        assert ends(process) == 0
        process.release()


def test_without_the_flag_nothing_is_imported() -> None:
    code = "import sys, rallypoint.agent.launch, rallypoint.workers.context\nprint(*sys.modules)"
    shown = completed([sys.executable, "-c", code], check=True)
    assert not [name for name in shown.stdout.split() if "preload" in name]
