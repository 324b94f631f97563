"""The reaper: its frames, what workers get from it, and that it leaves nothing when its agent is gone."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
from tests.unit.workers.test_process import TIMEOUT, ends, parent_of
from tests.unit.workers.tracing import TRACEABLE, traced
from tests.waiting import until

pytestmark = pytest.mark.process


@given(st.lists(st.tuples(st.integers(), st.binary() | st.lists(st.binary()))), st.integers(1, 50))
def test_messages_come_out_as_they_went_in(messages: list[tuple[object, ...]], size: int) -> None:
    data = b"".join(map(frame, messages))
    buffer, found = bytearray(), []
    for at in range(0, len(data), size):
        buffer += data[at : at + size]
        while (message := parse(buffer)) is not None:
            found.append(message)
    assert found == messages
    assert not buffer


def test_who_is_below() -> None:
    parents = {2: 1, 3: 1, 4: 2, 5: 4, 6: 3}
    assert descendants(2, parents) == {4, 5}
    assert descendants(1, parents) == {2, 3, 4, 5, 6}
    assert descendants(6, parents) == set()
    assert descendants(1, parents, {2}) == {3, 6}, "but what is kept, and what is below that"
    assert descendants(1, parents, {4}) == {2, 3, 6}


def test_what_is_removed(tmp_path: Path) -> None:
    for name in ("empty", "whole"):
        (tmp_path / name / "a" / "b").mkdir(parents=True)
        (tmp_path / name / "c").mkdir()
        (tmp_path / name / "c" / "file").write_text("kept")
        (tmp_path / name / "link").symlink_to(tmp_path)
    remove(os.fsencode(tmp_path / "empty"), whole=False)
    remove(os.fsencode(tmp_path / "whole"), whole=True)
    remove(b"/no/such/folder", whole=True)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["c", "empty", "file", "link"]


def signals(reaper: ReaperClient, name: str) -> set[int]:
    """A set of signals of a worker, without those that the C library keeps for itself."""
    bits = int(said(reaper, name, "/proc/self/status", program="grep").split()[1], 16)
    return {number for number in range(1, 32) if bits >> (number - 1) & 1}


def said(reaper: ReaperClient, *arguments: str, program: str = "") -> str:
    """What a program prints; without one, what a line of shell does."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as output:
        process = WorkerProcess(
            reaper, [program, *arguments] if program else ["sh", "-c", *arguments], os.environ, write
        )
        os.close(write)
        found = output.read().decode().strip()
        assert ends(process) == 0
        process.release()
    return found


def test_a_worker_finds_what_we_have_at_that_moment(
    reaper: ReaperClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    former, umask = signal.signal(signal.SIGUSR1, signal.SIG_IGN), os.umask(0o027)
    monkeypatch.chdir(tmp_path)
    try:
        assert signals(reaper, "SigBlk") == {signal.SIGUSR2}
        assert signals(reaper, "SigIgn") == {signal.SIGUSR1}
        assert said(reaper, "umask") == "0027"
        assert said(reaper, "pwd") == str(tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, former)
        os.umask(umask)
    assert not signals(reaper, "SigIgn")
    assert not signals(reaper, "SigBlk")
    assert said(reaper, "ls /proc/self/fd").split() == ["0", "1", "2", "3"], "the last is that of ls itself"


MANY = 300
"""So many that their descriptors do not fit into one message."""


def test_many_are_started_at_once_and_each_is_what_was_asked_for(
    reaper: ReaperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [os.memfd_create("output") for _ in range(MANY)]
    commands = [
        Command(["sh", "-c", 'echo $PPID $ALL $OWN; exit "$OWN"', "sh"], {"OWN": str(number % 100)}, (None, fd, None))
        for number, fd in enumerate(outputs)
    ]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(client, "ANSWER_TIMEOUT", 0.1)  # for each of them
            started = start_workers(reaper, commands, {**os.environ, "ALL": "all"})
        processes = [AdoptedProcess(reaper, each) for each in started]
        assert len({each.pid for each in processes}) == MANY
        assert [ends(each) for each in processes] == [number % 100 for number in range(MANY)]
        said = [os.pread(fd, 100, 0).decode().split()[1:] for fd in outputs]
        assert said == [["all", str(number % 100)] for number in range(MANY)]
        for each in processes:
            each.release()
    finally:
        for fd in outputs:
            os.close(fd)


def test_where_one_of_many_cannot_be_started_none_is_left(reaper: ReaperClient) -> None:
    commands = [Command(["sleep", "600"], {"PATH": "/none"} if number == 77 else {}) for number in range(100)]
    one = WorkerProcess(reaper, ["sleep", "600"], os.environ)
    inner = parent_of(one.pid)
    with pytest.raises(UserError, match="'sleep' was not found"):
        start_workers(reaper, commands, os.environ)
    until(lambda: descendants(inner, {pid: each.parent for pid, each in process_table().items()}) == {one.pid})
    assert one.poll() is None
    one.release()


def test_an_exit_is_that_of_the_last_process_with_the_number() -> None:
    tree = ProcessTree(-1)
    tree.exits[7] = 1
    tree.watch_child(7, excluded=False)
    assert not tree.exits


def test_it_reaps_what_it_adopts(reaper: ReaperClient) -> None:
    pid = int(said(reaper, "(sleep 0 & echo $!)"))
    fd = reaper.begin_sweep()
    assert os.read(fd, 1)
    os.close(fd)
    assert not Path(f"/proc/{pid}").exists()


def test_a_fence_kills_all_that_is_below_and_nothing_that_is_started_later(reaper: ReaperClient) -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    process = WorkerProcess(reaper, ["sh", "-c", "trap '' TERM; setsid sleep 600 & sleep 600"], os.environ)
    reaper.fence(now + 3600)
    assert said(reaper, "echo well") == "well"
    os.kill(process.pid, signal.SIGSTOP)
    reaper.fence(now - 1)
    assert ends(process) == -signal.SIGKILL
    assert said(reaper, "echo well") == "well"
    reaper.fence(math.inf)
    process.release()
    sweep = reaper.begin_sweep()
    assert os.read(sweep, 1), "its own sweeps still end"
    os.close(sweep)


def test_a_fence_comes_while_its_agent_does_nothing(reaper: ReaperClient) -> None:
    process = WorkerProcess(reaper, ["sleep", "600"], os.environ)
    reaper.fence(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.3)
    assert readable(process.fileno(), TIMEOUT)
    assert ends(process) == -signal.SIGKILL
    process.release()


def test_an_exception_in_the_midst_of_a_call_breaks_the_connection(reaper: ReaperClient) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    process = WorkerProcess(reaper, ["sleep", "600"], os.environ)
    former = signal.signal(signal.SIGALRM, interrupt)
    inner = parent_of(process.pid)
    os.kill(inner, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            WorkerProcess(reaper, ["sleep", "600"], os.environ)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert reaper.lost
    with pytest.raises(ReaperLost, match=r"it was stopped \(SIGSTOP\)"):
        reaper.set_cleanup()
    assert "OOM" not in reaper.lost_reason
    assert select.select([process.fileno()], [], [], TIMEOUT)[0], "and what runs below it ends"
    process.release()


@pytest.mark.parametrize("both", [False, True], ids=["reaper", "reaper_and_supervisor"])
@pytest.mark.parametrize("how", ["a_request", "close"])
def test_a_stopped_one_that_is_given_up_is_killed_with_what_it_guards(
    monkeypatch: pytest.MonkeyPatch, how: str, both: bool
) -> None:
    reaper = ReaperClient()
    process = WorkerProcess(reaper, ["sh", "-c", "setsid sleep 600 & exec sleep 600"], os.environ)
    monkeypatch.setattr(client, "ANSWER_TIMEOUT", 0.2)  # from now on: a start may take longer on a busy machine
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


def test_it_adopts_only_what_is_below_it(reaper: ReaperClient) -> None:
    """A pid may be a stranger's by the time it is asked for."""
    with subprocess.Popen(["sleep", "600"]) as stranger:
        assert not reaper.adopt(stranger.pid, excluded=True)
        assert not reaper.adopt(stranger.pid)
        sweep = reaper.begin_sweep()
        assert os.read(sweep, 1)
        os.close(sweep)
        assert stranger.poll() is None
        stranger.kill()
    child = int(said(reaper, "sleep 600 >/dev/null & echo $!"))
    assert reaper.adopt(child)


@pytest.mark.parametrize("call", [ReaperClient.signals_received, lambda reaper: os.close(reaper.begin_sweep())])
def test_an_exception_at_any_place_of_a_call_leaves_nobody_waiting(
    call: Callable[[ReaperClient], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's end needs the reaper once more, while the exception that has interrupted a call is still handled."""
    reapers, usual = [ReaperClient()], client._CLOSE_TIMEOUT
    try:
        monkeypatch.setattr(client, "_CLOSE_TIMEOUT", 0.0)  # those that are lost end beside one another
        for place, error in interrupt_everywhere(lambda: call(reapers[-1])):
            again = threading.Thread(target=answers_or_is_lost, args=[reapers[-1]], daemon=True)
            again.start()
            again.join(TIMEOUT)
            assert not again.is_alive(), f"interrupted in {place}, a call left the lock taken: {error!r}"
            if reapers[-1].lost:
                reapers.append(ReaperClient())
    finally:
        monkeypatch.setattr(client, "_CLOSE_TIMEOUT", usual)
        for each in reapers:
            each.close()


def answers_or_is_lost(reaper: ReaperClient) -> None:
    with contextlib.suppress(ReaperLost):
        reaper.signals_received()


def test_an_exception_while_the_connection_is_broken_off_leaves_it_lost(reaper: ReaperClient) -> None:
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


def test_a_forked_child_that_holds_the_connection_does_not_hide_the_agents_end(tmp_path: Path) -> None:
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
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
found = [fd for fd in range(3) if is_open(fd)]
with open(sys.argv[1], "w") as file:
    print(*found, file=file)
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
def test_what_is_opened_in_the_place_of_a_standard_descriptor_is_not_handed_on_as_one(
    closed: str, tmp_path: Path
) -> None:
    path = tmp_path / "open"
    command = [sys.executable, "-c", WITHOUT, OPEN_ONES, str(path), *closed.split()]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
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
def test_a_kernel_without_close_range_costs_no_time() -> None:
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


def test_a_sweep_goes_on_when_there_was_no_descriptor_to_look_with() -> None:
    done = completed([sys.executable, "-c", WITHOUT_A_DESCRIPTOR], timeout=TIMEOUT)
    assert done.stdout == f"{-signal.SIGKILL}\n", done.stderr


def test_a_sweep_kills_nothing_that_is_started_after_it(reaper: ReaperClient) -> None:
    read, write = os.pipe()
    text = TRACEABLE + "import os, signal; os.write(1, b'up'); signal.pause()"
    held = WorkerProcess(reaper, [sys.executable, "-c", text], os.environ, write)
    os.close(write)
    assert os.read(read, 2) == b"up"
    os.close(read)
    with traced(held.pid) as tracer:
        fd = reaper.begin_sweep()
        tracer.holds()
        assert not readable(fd)
        next_one = WorkerProcess(reaper, ["sleep", "0.3"], os.environ)
        assert ends(next_one) == 0
        assert os.read(fd, 1), "it is over, as far as it came"
        os.close(fd)
    assert ends(held) == -signal.SIGKILL
    held.release()
    next_one.release()


def test_one_that_is_stopped_hears_that_it_is_to_end(reaper: ReaperClient) -> None:
    text = "trap 'exit 7' TERM; kill -STOP $$; while :; do sleep 0.05; done"
    held = WorkerProcess(reaper, ["sh", "-c", text], os.environ)
    until(lambda: process_table()[held.pid].state == "T")
    fd = reaper.begin_sweep(TIMEOUT)
    assert ends(held) == 7
    os.close(fd)
    held.release()


OUR_FILES = ("program", "protocol")


def test_it_runs_our_own_files_and_loads_nothing_that_is_costly(tmp_path: Path) -> None:
    for name in ("rallypoint", "select", "_ctypes"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a wrong one')")
    begin, _, _ = client._BOOTSTRAP.rpartition("; main(")
    text = (
        begin
        + "; print(*(f'{name} {getattr(each, \"__file__\", None)}' for name, each in sys.modules.items()), sep='\\n')"
    )
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
    paths = ("base/pidfds", "base/process_table", *(f"workers/reaper/{name}" for name in OUR_FILES))
    assert ours == {path.rpartition("/")[2]: f"{client._FOLDER}/{path}.py" for path in paths}
    assert not {"os", "signal", "socket", "typing", "warnings", "importlib", "ctypes"} & loaded.keys()


def test_a_sweep_whose_reaper_is_lost_is_not_over(reaper: ReaperClient) -> None:
    held = WorkerProcess(reaper, ["sleep", "600"], os.environ)
    os.kill(reaper.pid, signal.SIGSTOP)  # the supervisor, so that the reaper's end stays unknown until we look
    children = Path(f"/proc/{reaper.pid}/task/{reaper.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGSTOP)
    fd = reaper.begin_sweep()
    os.kill(int(children[0]), signal.SIGKILL)
    assert readable(fd, TIMEOUT)
    assert not os.read(fd, 1), "only the end of the pipe"
    os.close(fd)
    os.kill(reaper.pid, signal.SIGCONT)
    assert readable(held.fileno(), TIMEOUT), "the supervisor kills what is left"
    held.release()


def test_the_one_that_waits_is_taken_once() -> None:
    client.prestart()
    client.prestart()
    first, second = client.take_prestarted(), client.take_prestarted()
    try:
        assert first.pid != second.pid
        assert not first.lost
    finally:
        first.close()
        second.close()


def test_one_that_was_lost_meanwhile_is_not_given_out() -> None:
    client.prestart()
    waiting = client._prestarted
    assert waiting is not None
    os.kill(waiting.pid, signal.SIGKILL)
    assert select.select([waiting.fileno()], [], [], 30)[0]
    taken = client.take_prestarted()
    assert taken.pid != waiting.pid
    taken.close()


def test_one_that_nobody_takes_ends_with_the_process() -> None:
    begin = "from rallypoint.workers.reaper import client; client.prestart(); "
    text = begin + "print(client._prestarted.pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        handle = open_process(int(process.stdout.readline()))
        process.communicate("\n", 30)
    try:
        assert readable(handle.fileno(), 30)
    finally:
        handle.close()


def process_of(reaper: ReaperClient) -> int:
    """The reaper's own process, which its supervisor has forked; it is there when it answers."""
    assert reaper.signals_received() == []
    (found,) = descendants(reaper.pid, {pid: each.parent for pid, each in process_table().items()})
    return found


def test_the_reaper_keeps_what_it_is_sent(reaper: ReaperClient) -> None:
    pid = process_of(reaper)
    sent = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT]
    for number in (*sent, signal.SIGTERM):
        os.kill(pid, number)
    assert reaper.signals_received() == sorted(sent)
    assert reaper.signals_received() == []


def test_a_worker_that_starts_has_not_been_sent_what_came_before(reaper: ReaperClient) -> None:
    pid = process_of(reaper)
    os.kill(pid, signal.SIGTERM)
    process = WorkerProcess(reaper, [sys.executable, "-c", ""], os.environ)
    assert reaper.signals_received() == []
    assert ends(process) == 0
    process.release()
