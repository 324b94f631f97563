"""The reaper: its frames, what workers get from it, and that it leaves nothing when its agent is gone."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.base.kernel import readable
from rallypoint.base.open_process import open_process
from rallypoint.base.process_table import descendants, process_table
from rallypoint.workers.process import AdoptedProcess, WorkerProcess, start_workers
from rallypoint.workers.reaper import client
from rallypoint.workers.reaper.client import Command, ReaperClient, ReaperLost
from rallypoint.workers.reaper.program import ProcessTree, remove
from rallypoint.workers.reaper.protocol import frame, parse
from tests import denying
from tests.interrupts import interrupt_everywhere
from tests.processes import below, completed
from tests.unit.workers.starting import Up, interrupted_after
from tests.unit.workers.test_process import TIMEOUT, ends, parent_of
from tests.unit.workers.tracing import TRACEABLE, traced
from tests.waiting import until

pytestmark = pytest.mark.process


@given(st.lists(st.tuples(st.integers(), st.binary() | st.lists(st.binary()))), st.integers(1, 50))
def test_messages_are_parsed_as_framed(messages: list[tuple[object, ...]], size: int) -> None:
    data = b"".join(map(frame, messages))
    buffer, found = bytearray(), []
    for at in range(0, len(data), size):
        buffer += data[at : at + size]
        while (message := parse(buffer)) is not None:
            found.append(message)
    assert found == messages
    assert not buffer


def test_descendants() -> None:
    parents = {2: 1, 3: 1, 4: 2, 5: 4, 6: 3}
    assert descendants(2, parents) == {4, 5}
    assert descendants(1, parents) == {2, 3, 4, 5, 6}
    assert descendants(6, parents) == set()
    assert descendants(1, parents, {2}) == {3, 6}, "without the excluded process and its descendants"
    assert descendants(1, parents, {4}) == {2, 3, 6}


def test_remove(tmp_path: Path) -> None:
    for name in ("empty", "whole"):
        (tmp_path / name / "a" / "b").mkdir(parents=True)
        (tmp_path / name / "c").mkdir()
        (tmp_path / name / "c" / "file").write_text("kept")
        (tmp_path / name / "link").symlink_to(tmp_path)
    remove(os.fsencode(tmp_path / "empty"), whole=False)
    remove(os.fsencode(tmp_path / "whole"), whole=True)
    remove(b"/no/such/folder", whole=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "empty", "file", "link"]


@contextlib.contextmanager
def worker(reaper: ReaperClient, *argv: str, stdout: int | None = None) -> Iterator[WorkerProcess]:
    """A worker, which has ended after the block."""
    process = WorkerProcess(reaper, argv, os.environ, stdout)
    yield process
    process.release()


def sleeper(reaper: ReaperClient) -> contextlib.AbstractContextManager[WorkerProcess]:
    return worker(reaper, "sleep", "600")


def swept(reaper: ReaperClient) -> bool:
    """Sweep; returns whether the reaper has finished."""
    fd = reaper.begin_sweep()
    try:
        return bool(os.read(fd, 1))
    finally:
        os.close(fd)


def signals(reaper: ReaperClient, name: str) -> set[int]:
    """A set of signals of a worker, without those that the C library reserves."""
    bits = int(output_of(reaper, name, "/proc/self/status", program="grep").split()[1], 16)
    return {number for number in range(1, 32) if bits >> (number - 1) & 1}


def output_of(reaper: ReaperClient, *arguments: str, program: str = "") -> str:
    """The output of a program; without one, of a line of shell."""
    argv = [program, *arguments] if program else ["sh", "-c", *arguments]
    read, write = os.pipe()
    with os.fdopen(read, "rb") as output, worker(reaper, *argv, stdout=write) as process:
        os.close(write)
        found = output.read().decode().strip()
        assert ends(process) == 0
    return found


def test_workers_inherit_the_current_attributes_of_the_agent(
    reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    former, umask = signal.signal(signal.SIGUSR1, signal.SIG_IGN), os.umask(0o027)
    monkeypatch.chdir(tmp_path)
    try:
        assert signals(reaper, "SigBlk") == {signal.SIGUSR2}
        assert signals(reaper, "SigIgn") == {signal.SIGUSR1}
        assert output_of(reaper, "umask") == "0027"
        assert output_of(reaper, "pwd") == str(tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, former)
        os.umask(umask)
    assert not signals(reaper, "SigIgn")
    assert not signals(reaper, "SigBlk")
    assert output_of(reaper, "ls /proc/self/fd").split() == ["0", "1", "2", "3"], "the last is of ls itself"


MANY = 300
"""Their descriptors do not fit into one message."""


def test_many_workers_at_once(reaper: ReaperClient, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [os.memfd_create("output") for _ in range(MANY)]
    commands = [
        Command(["sh", "-c", 'echo $PPID $ALL $OWN; exit "$OWN"', "sh"], {"OWN": str(number % 100)}, (None, fd, None))
        for number, fd in enumerate(outputs)
    ]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(client, "ANSWER_TIMEOUT", 0.1)  # per worker
            started = start_workers(reaper, commands, {**os.environ, "ALL": "all"})
        processes = [AdoptedProcess(reaper, handle) for handle in started]
        assert len({process.pid for process in processes}) == MANY
        assert [ends(process) for process in processes] == [number % 100 for number in range(MANY)]
        written = [os.pread(fd, 100, 0).decode().split()[1:] for fd in outputs]
        assert written == [["all", str(number % 100)] for number in range(MANY)]
        for process in processes:
            process.release()
    finally:
        for fd in outputs:
            os.close(fd)


def test_if_one_of_many_cannot_be_started_none_remains(reaper: ReaperClient) -> None:
    commands = [Command(["sleep", "600"], {"PATH": "/none"} if number == 77 else {}) for number in range(100)]
    with sleeper(reaper) as other:
        with pytest.raises(UserError, match="'sleep' was not found"):
            start_workers(reaper, commands, os.environ)
        inner = parent_of(other.pid)

        def remaining() -> set[int]:
            return descendants(inner, {pid: process.parent for pid, process in process_table().items()})

        until(lambda: remaining() == {other.pid})
        assert other.poll() is None


def test_a_reused_pid_has_no_old_exit() -> None:
    tree = ProcessTree(-1)
    tree.exits[7] = 1
    tree.watch_child(7, excluded=False)
    assert not tree.exits


def test_orphans_are_reaped(reaper: ReaperClient) -> None:
    pid = int(output_of(reaper, "(sleep 0 & echo $!)"))
    assert swept(reaper)
    assert not Path(f"/proc/{pid}").exists()


def test_a_fence_kills_all_descendants_and_no_later_worker(reaper: ReaperClient) -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    with worker(reaper, "sh", "-c", "trap '' TERM; setsid sleep 600 & sleep 600") as process:
        reaper.fence(now + 3600)
        assert output_of(reaper, "echo well") == "well"
        os.kill(process.pid, signal.SIGSTOP)
        reaper.fence(now - 1)
        assert ends(process) == -signal.SIGKILL
        assert output_of(reaper, "echo well") == "well"
        reaper.fence(math.inf)
    assert swept(reaper)
    with sleeper(reaper) as process:
        reaper.fence(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.3)  # while the agent does nothing
        assert readable(process.fileno(), TIMEOUT)
        assert ends(process) == -signal.SIGKILL


def test_an_interrupted_call_breaks_the_connection(reaper: ReaperClient) -> None:
    with sleeper(reaper) as process:
        os.kill(parent_of(process.pid), signal.SIGSTOP)
        with interrupted_after(0.1):
            WorkerProcess(reaper, ["sleep", "600"], os.environ)
        assert reaper.lost
        with pytest.raises(ReaperLost, match=r"it was stopped \(SIGSTOP\)"):
            reaper.set_cleanup()
        assert "OOM" not in reaper.lost_reason
        assert readable(process.fileno(), TIMEOUT), "the worker is ended"


@pytest.mark.parametrize("both", [False, True], ids=["reaper", "reaper_and_supervisor"])
@pytest.mark.parametrize("how", ["a_request", "close"])
def test_a_stopped_reaper_is_killed_with_its_workers(monkeypatch: pytest.MonkeyPatch, how: str, both: bool) -> None:
    reaper = ReaperClient()
    process = WorkerProcess(reaper, ["sh", "-c", "setsid sleep 600 & exec sleep 600"], os.environ)
    monkeypatch.setattr(client, "ANSWER_TIMEOUT", 0.2)  # after the start, which may take longer
    monkeypatch.setattr(client, "_CLOSE_TIMEOUT", 0.5)
    inner = parent_of(process.pid)
    until(lambda: len(below(reaper.pid)) == 3)
    left = [reaper.pid, *below(reaper.pid)]
    for pid in (inner, reaper.pid)[: 1 + both]:
        os.kill(pid, signal.SIGSTOP)
    if how == "a_request":
        with pytest.raises(ReaperLost, match="it does not answer"):
            reaper.signals_received()
    reaper.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    process.release()


def test_only_descendants_are_adopted(reaper: ReaperClient) -> None:
    """A pid may be reused by a stranger before the request."""
    with subprocess.Popen(["sleep", "600"]) as stranger:
        assert not reaper.adopt(stranger.pid, excluded=True)
        assert not reaper.adopt(stranger.pid)
        assert swept(reaper)
        assert stranger.poll() is None
        stranger.kill()
    child = int(output_of(reaper, "sleep 600 >/dev/null & echo $!"))
    assert reaper.adopt(child)


@pytest.mark.parametrize("call", [ReaperClient.signals_received, lambda reaper: os.close(reaper.begin_sweep())])
def test_interrupted_calls_block_nothing(
    call: Callable[[ReaperClient], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's end calls the reaper while it handles the exception that has interrupted a call."""
    reapers, usual = [ReaperClient()], client._CLOSE_TIMEOUT
    try:
        monkeypatch.setattr(client, "_CLOSE_TIMEOUT", 0.0)  # lost reapers end in parallel
        for place, error in interrupt_everywhere(lambda: call(reapers[-1])):
            again = threading.Thread(target=answers_or_is_lost, args=[reapers[-1]], daemon=True)
            again.start()
            again.join(TIMEOUT)
            assert not again.is_alive(), f"interrupted in {place}, a call left the lock taken: {error!r}"
            if reapers[-1].lost:
                reapers.append(ReaperClient())
    finally:
        monkeypatch.setattr(client, "_CLOSE_TIMEOUT", usual)
        for reaper in reapers:
            reaper.close()


def answers_or_is_lost(reaper: ReaperClient) -> None:
    with contextlib.suppress(ReaperLost):
        reaper.signals_received()


def test_an_exception_in_a_disconnect_leaves_the_reaper_lost(reaper: ReaperClient) -> None:
    states = [reaper.lost for _ in interrupt_everywhere(lambda: reaper._disconnect(""))]
    assert states == sorted(states)
    with pytest.raises(ReaperLost):
        reaper.signals_received()


FORKING = """
import os, signal, sys
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.process import WorkerProcess
reaper = ReaperClient()
reaper.set_cleanup(empty=[sys.argv[1]], whole=[sys.argv[2]])
reaper.set_record(sys.argv[3], "outcome: killed\\n")
process = WorkerProcess(reaper, ["sleep", "600"], os.environ)
child = os.fork()
if child == 0:
    signal.pause()
print(reaper.pid, process.pid, child, flush=True)
signal.pause()
"""


def test_a_forked_child_does_not_hide_the_end_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "file").write_text("")
    command = [sys.executable, "-c", FORKING, *(str(tmp_path / name) for name in ("empty", "whole", ""))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(word) for word in agent.stdout.readline().split()]
        handles = [open_process(pid) for pid in pids[:2]]
        try:
            agent.kill()
            for handle in handles:
                assert readable(handle.fileno(), TIMEOUT)
            (record,) = tmp_path.iterdir()
            assert re.fullmatch(rf"\d{{14}}-{agent.pid}", record.name)
            assert re.fullmatch(r"outcome: killed\nended: \d+\.\d+\n", record.read_text())
        finally:
            os.kill(pids[2], signal.SIGKILL)
            for handle in handles:
                handle.close()


OPEN_ONES = """
import os, sys
found = [fd for fd in "012" if os.path.exists(f"/proc/self/fd/{fd}")]
open(sys.argv[1], "w").write(" ".join(found))
"""

WITHOUT = """
import os, select, sys
for fd in map(int, sys.argv[3:]):
    os.close(fd)
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.process import WorkerProcess
reaper = ReaperClient()
assert min(reaper.fileno(), reaper._link.socket.fileno()) > 2
others = [os.open("/dev/null", os.O_RDWR) for _ in range(3)]
process = WorkerProcess(reaper, [sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ)
select.select([process.fileno()], [], [])
code = process.poll()
process.release()
reaper.close()
os._exit(code)
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1", "0 1 2"])
def test_files_in_place_of_standard_descriptors_are_not_inherited(closed: str, tmp_path: Path) -> None:
    path = tmp_path / "open"
    command = [sys.executable, "-c", WITHOUT, OPEN_ONES, str(path), *closed.split()]
    completed(command, timeout=TIMEOUT, check=True)
    assert set(path.read_text().split()) == {"0", "1", "2"} - set(closed.split())


NO_CLOSE_RANGE = """
import os
from rallypoint.workers.reaper.client import ReaperClient
for fd in range(40):
    os.dup(0)
reaper = ReaperClient()
reaper.signals_received()
print(len(os.listdir(f"/proc/{reaper.pid}/fd")))
reaper.close()
"""


@pytest.mark.skipif(denying.why_not() is not None, reason=str(denying.why_not()))
def test_a_kernel_without_close_range() -> None:
    """As before Linux 5.9, and under some container runtimes."""
    command = [*denying.denying("close_range=ENOSYS"), sys.executable, "-c", NO_CLOSE_RANGE]
    done = completed(command, timeout=TIMEOUT, check=True)
    assert int(done.stdout) <= 6, "and what was inherited is closed"


WITHOUT_A_DESCRIPTOR = """
import os, resource, sys
from rallypoint.workers.reaper.program import ProcessTree, sigchld_fd
family = ProcessTree(sigchld_fd())
child = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
family.started.add(child)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
assert family.sweep(), "it must look again"
family.give_up()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
family.end(30)
print(family.exits[child])
"""


def test_a_sweep_survives_a_shortage_of_descriptors() -> None:
    done = completed([sys.executable, "-c", WITHOUT_A_DESCRIPTOR], timeout=TIMEOUT)
    assert done.stdout == f"{-signal.SIGKILL}\n", done.stderr


def test_a_sweep_kills_no_later_worker(reaper: ReaperClient, up: Up) -> None:
    held = up(TRACEABLE + "import os, signal; os.write(1, b'up'); signal.pause()")
    with traced(held.pid) as tracer:
        fd = reaper.begin_sweep()
        tracer.wait_until_held()
        assert not readable(fd)
        with worker(reaper, "sleep", "0.3") as later:
            assert ends(later) == 0
        assert os.read(fd, 1), "it has finished without the held process"
        os.close(fd)
    assert ends(held) == -signal.SIGKILL


def test_a_sweep_asks_stopped_processes_too(reaper: ReaperClient) -> None:
    with worker(reaper, "sh", "-c", "trap 'exit 7' TERM; kill -STOP $$; while :; do sleep 0.05; done") as held:
        until(lambda: process_table()[held.pid].state == "T")
        fd = reaper.begin_sweep(TIMEOUT)
        assert ends(held) == 7
        os.close(fd)


def test_it_runs_our_files_and_imports_nothing_costly(tmp_path: Path) -> None:
    for name in ("rallypoint", "select", "_ctypes"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a wrong one')")
    begin, _, _ = client._BOOTSTRAP.rpartition("; main(")
    show = "f'{name} {getattr(module, \"__file__\", None)}' for name, module in sys.modules.items()"
    text = f"{begin}; print(*({show}), sep='\\n')"
    done = completed(
        [sys.executable, "-I", "-S", "-c", text, client._FOLDER],
        timeout=TIMEOUT,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
    )
    loaded = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    ours = {name.rpartition(".")[2]: path for name, path in loaded.items() if name.startswith("rallypoint.")}
    ours = {name: path for name, path in ours.items() if path != "None"}
    paths = ("base/pidfds", "base/process_table", "workers/reaper/program", "workers/reaper/protocol")
    assert ours == {path.rpartition("/")[2]: f"{client._FOLDER}/{path}.py" for path in paths}
    assert not {"os", "signal", "socket", "typing", "warnings", "importlib", "ctypes"} & loaded.keys()


def test_the_sweep_of_a_lost_reaper_is_not_finished(reaper: ReaperClient) -> None:
    with sleeper(reaper) as held:
        inner = parent_of(held.pid)
        os.kill(reaper.pid, signal.SIGSTOP)  # the supervisor, so that the reaper's end stays unknown until we look
        os.kill(inner, signal.SIGSTOP)
        fd = reaper.begin_sweep()
        os.kill(inner, signal.SIGKILL)
        assert readable(fd, TIMEOUT)
        assert not os.read(fd, 1), "only the end of the pipe"
        os.close(fd)
        os.kill(reaper.pid, signal.SIGCONT)
        assert readable(held.fileno(), TIMEOUT), "the supervisor kills the worker"


def test_a_prestarted_reaper_is_taken_once_unless_it_is_lost() -> None:
    client.prestart()
    client.prestart()
    first, second = client.take_prestarted(), client.take_prestarted()
    client.prestart()
    waiting = client._prestarted
    assert waiting is not None
    os.kill(waiting.pid, signal.SIGKILL)
    assert readable(waiting.fileno(), 30)
    third = client.take_prestarted()
    try:
        assert not first.lost
        assert len({first.pid, second.pid, waiting.pid, third.pid}) == 4
    finally:
        for reaper in (first, second, third):
            reaper.close()


def test_a_prestarted_reaper_ends_with_the_process() -> None:
    begin = "from rallypoint.workers.reaper import client; client.prestart(); "
    text = begin + "print(client._prestarted.pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        handle = open_process(int(process.stdout.readline()))
        process.communicate("\n", 30)
    with contextlib.closing(handle):
        assert readable(handle.fileno(), 30)


def test_the_reaper_keeps_the_signals_since_the_last_start(reaper: ReaperClient) -> None:
    assert reaper.signals_received() == []
    (pid,) = below(reaper.pid)
    sent = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT]
    for number in (*sent, signal.SIGTERM):
        os.kill(pid, number)
    assert reaper.signals_received() == sorted(sent)
    assert reaper.signals_received() == []
    os.kill(pid, signal.SIGTERM)
    with worker(reaper, "true") as process:
        assert reaper.signals_received() == [], "the new worker has not received it"
        assert ends(process) == 0
