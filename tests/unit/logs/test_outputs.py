"""Outputs of real processes arrive byte for byte."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from socket import socketpair
from typing import TypeAlias

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.inotify import Inotify
from rallypoint.features.collapse.merging import CollapsingSink
from rallypoint.workers.logs import console as console_module
from rallypoint.workers.logs import outputs as module
from rallypoint.workers.logs.outputs import Pump, WorkerConsole, WorkerOutput
from rallypoint.workers.logs.specs import LogsDest
from tests.unit.logs.opened import Outputs
from tests.waiting import until

pytestmark = pytest.mark.process

DEADLINE = 120.0
Worker: TypeAlias = "subprocess.Popen[bytes]"


class Console:
    """The agent's console: a pipe read by a thread."""

    def __init__(self, terminal: bool = False) -> None:
        self._reading, self.fd = os.openpty() if terminal else os.pipe()
        self._got = bytearray()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for(self, reached: Callable[[bytes], bool]) -> bytes:
        """The bytes so far, once `reached` is true of them."""
        with self._news:
            assert self._news.wait_for(lambda: reached(bytes(self._got)), DEADLINE), bytes(self._got[-1000:])
            return bytes(self._got)

    def end(self) -> bytes:
        """Close it and return all bytes."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)
            self._thread.join(DEADLINE)
            os.close(self._reading)
        return bytes(self._got)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._reading, 1 << 16):
                with self._news:
                    self._got += chunk
                    self._news.notify_all()


def _console() -> Iterator[Console]:
    console = Console()
    yield console
    console.end()


_out = pytest.fixture(name="out")(_console)
_err = pytest.fixture(name="err")(_console)


def _start(outputs: Outputs, rank: int, code: str, *arguments: str, stdin: int | None = None) -> Worker:
    return _start_worker(outputs.of[rank], code, *arguments, stdin=stdin)


def _start_worker(output: WorkerOutput, code: str, *arguments: str, stdin: int | None = None) -> Worker:
    stdout, stderr = output.worker_ends
    command = [sys.executable, "-S", "-u", "-c", code, *arguments]
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr)
    finally:
        output.close_worker_ends()


def _marks(outputs: Outputs) -> list[object]:
    return [output.marks() for output in outputs.of.values()]


def _files(folder: Path, count: int) -> dict[int, str]:
    return {rank: str(folder / f"{rank}.log") for rank in range(count)}


GARBAGE = """
import hashlib, os, sys
data = b"".join(hashlib.sha256(bytes([i, j])).digest() for i in range(100) for j in range(100))
"""
"""320,000 random bytes."""


def _garbage() -> bytes:
    return b"".join(hashlib.sha256(bytes([i, j])).digest() for i in range(100) for j in range(100))


def test_a_prompt_without_a_newline(out: Console, err: Console) -> None:
    outputs = Outputs(LogsDest(), range(1), {}, stdout=out.fd, stderr=err.fd)
    code = "import sys; sys.stderr.write('name? '); sys.stderr.flush(); sys.stderr.write(sys.stdin.read())"
    worker = _start(outputs, 0, code, stdin=subprocess.PIPE)
    err.wait_for(lambda got: got == b"name? ")
    worker.communicate(b"x\n", DEADLINE)
    outputs.close()
    assert err.end() == b"name? x\n"


@pytest.mark.parametrize("redirected_only", [True, False])
def test_last_lines(tmp_path: Path, out: Console, err: Console, redirected_only: bool) -> None:
    files = _files(tmp_path, 1)
    dest = LogsDest(stderrs=files, tee_stderrs={} if redirected_only else files)
    outputs = Outputs(dest, range(1), {0: "[0]:"}, stdout=out.fd, stderr=err.fd)
    worker = _start(outputs, 0, "import os; os.write(2, b'x' * 100_000 + b'\\nlast words'); os._exit(1)")
    worker.wait(DEADLINE)
    assert re.fullmatch(rb"x+\[\.\.\.\]x+\nlast words", outputs.of[0].last_lines())
    outputs.close()
    assert outputs.of[0].last_lines().endswith(b"\nlast words")
    assert err.end() == (b"" if redirected_only else b"[0]:" + b"x" * 100_000 + b"\n[0]:last words\n")


@pytest.mark.parametrize("in_file", [True, False])
def test_last_lines_with_a_long_line(tmp_path: Path, out: Console, err: Console, in_file: bool) -> None:
    dest = LogsDest(stderrs=_files(tmp_path, 1)) if in_file else LogsDest()
    outputs = Outputs(dest, range(1), {}, stdout=out.fd, stderr=err.fd)
    program = "import sys; sys.stderr.write('before\\n' + 'x' * 900_000 + 'end\\nafter\\n')"
    _start(outputs, 0, program).wait(DEADLINE)
    before, line, after, _ = outputs.of[0].last_lines().split(b"\n")
    assert (before, after) == (b"before", b"after")
    assert (line[:5], line[-5:]) == (b"xxxxx", b"xxend")
    assert b"x[...]x" in line
    assert len(outputs.of[0].last_lines()) <= 64 * 1024
    outputs.close()


RAISED = b'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\nValueError: the reason\n'
CAUGHT = RAISED.replace(b"<module>", b"close").replace(b"the reason", b"noise")


def _noise(size: int) -> bytes:
    return (b"[W socket.cpp:464] a connection is shut down\n" * 20 + CAUGHT) * (size // 1000)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("size", [20_000, 62_000, 70_000, 300_000, 3_000_000])
def test_last_lines_include_an_earlier_traceback(
    tmp_path: Path, out: Console, err: Console, in_file: bool, size: int
) -> None:
    dest = LogsDest(stderrs=_files(tmp_path, 1)) if in_file else LogsDest()
    outputs = Outputs(dest, range(1), {}, stdout=out.fd, stderr=err.fd)
    written = b"earlier\n" * 50_000 + RAISED + _noise(size)
    (tmp_path / "written").write_bytes(written)
    program = f"import sys; sys.stderr.buffer.write(open({str(tmp_path / 'written')!r}, 'rb').read())"
    _start(outputs, 0, program).wait(DEADLINE)
    last = outputs.of[0].last_lines()
    assert last.count(RAISED) == 1
    assert len(last) <= 64 * 1024
    assert last.endswith(written[-8 * 1024 :])
    kept, gap, tail = last.partition(b"\n[...]\n")
    assert (size > 65_000) is bool(gap), "a gap only in long output"
    assert written.endswith(tail)
    assert kept in written
    outputs.close()


def test_last_lines_include_a_traceback_at_the_cut(tmp_path: Path) -> None:
    (path := tmp_path / "log").write_bytes(b"")
    output = WorkerOutput("", str(path))
    for size in range(64 * 1024 - len(RAISED) - 40, 64 * 1024 + 40, 7):
        path.write_bytes(b"x\n" * 9 + RAISED + b"y" * (size // 2) + b"\n" + b"y" * (size - size // 2))
        assert RAISED in output.last_lines()
        assert len(output.last_lines()) <= 64 * 1024


@pytest.mark.parametrize("teed", [True, False])
def test_label(tmp_path: Path, out: Console, err: Console, teed: bool) -> None:
    files = _files(tmp_path, 1)
    dest = LogsDest(stderrs=files, tee_stderrs=files) if teed else LogsDest()
    outputs = Outputs(dest, range(1), {0: "[0]:"}, stdout=out.fd, stderr=err.fd)
    code = """
import os, sys
os.write(2, b"one\\ntwo")
open(sys.argv[1]).read()
for byte in b"a\\n\\nb\\n":
    os.write(2, bytes([byte]))
"""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    worker = _start(outputs, 0, code, str(gate))
    err.wait_for(lambda got: got.endswith(b"[0]:one\n" if teed else b"two"))
    outputs.of[0].label("[rank 3 on n3] ")
    outputs.of[0].label("[rank 3 on n3] ")
    gate.write_bytes(b"")
    worker.wait(DEADLINE)
    assert outputs.of[0].last_lines() == b"one\ntwoa\n\nb\n", "the report shows the plain output"
    outputs.close()
    first = b"[0]:one\n[rank 3 on n3] twoa\n" if teed else b"one\ntwo\n[rank 3 on n3] a\n"
    assert err.end() == first + b"[rank 3 on n3] \n[rank 3 on n3] b\n"


def test_redirected_streams(tmp_path: Path, out: Console, err: Console) -> None:
    threads = threading.active_count()
    dest = LogsDest(stdouts={0: str(tmp_path / "out")}, stderrs={0: str(tmp_path / "err")})
    outputs = Outputs(dest, range(1), {}, stdout=out.fd, stderr=err.fd)
    assert threading.active_count() == threads
    _start(outputs, 0, "import os; os.write(1, b'one\\n'); os.write(2, b'two\\n')").wait(DEADLINE)
    outputs.close()
    assert (tmp_path / "out").read_bytes() == b"one\n"
    assert (tmp_path / "err").read_bytes() == b"two\n"
    assert out.end() == err.end() == b""


def test_age(tmp_path: Path, out: Console, err: Console) -> None:
    dest = LogsDest(stdouts={0: str(tmp_path / "out")}, stderrs={0: str(tmp_path / "err")})
    outputs = Outputs(dest, range(4), {}, stdout=out.fd, stderr=err.fd)
    code = "import os, time; os.write({}, b'x'); time.sleep(0.2)"
    started = [_start(outputs, rank, code.format(fd)) for rank, fd in enumerate((1, 2, 1))]
    started.append(_start(outputs, 3, "pass"))
    for worker in started:
        worker.wait(DEADLINE)
    for console in (out, err):
        console.wait_for(lambda got: b"x" in got)
    *ages, silent = (outputs.of[rank].age() for rank in range(4))
    assert all(0 <= age < DEADLINE for age in ages)
    assert silent == -1.0
    outputs.close()
    out.end()
    err.end()


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_teed_prompt(tmp_path: Path, out: Console, err: Console, collapsed: bool) -> None:
    files = _files(tmp_path, 1)
    merges = partial(CollapsingSink, 0.2) if collapsed else None
    dest = LogsDest(stdouts=files, tee_stdouts=files)
    outputs = Outputs(dest, range(1), {0: "[0]:"}, stdout=out.fd, stderr=err.fd, merges=merges)
    program = "print('one'); name = input('name? '); print('it is', name)"
    worker = _start(outputs, 0, program, stdin=subprocess.PIPE)
    out.wait_for(lambda got: got == b"[0]:one\n[0]:name? \n")
    worker.communicate(b"x\n", DEADLINE)
    outputs.close()
    assert out.end() == b"[0]:one\n[0]:name? \n[0]:it is x\n"


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses the console in the middle of a line, even on a slow machine."""
    monkeypatch.setattr(console_module, "MAX_SILENCE", 10 * DEADLINE)
    monkeypatch.setattr(console_module, "MAX_WAIT", 10 * DEADLINE)


def test_a_grandchild_holds_the_pipe(out: Console, err: Console) -> None:
    before = threading.active_count()
    outputs = Outputs(LogsDest(), range(1), {}, stdout=out.fd, stderr=err.fd)
    code = """
import os, signal, sys
gate, open_gate = os.pipe()
if os.fork() == 0:
    os.write(open_gate, b"%d" % os.getpid())
    while True:
        signal.pause()
os.write(2, b"child " + os.read(gate, 20) + b"\\n")
"""
    _start(outputs, 0, code).wait(DEADLINE)
    grandchild = int(outputs.of[0].last_lines().split()[1])
    try:
        outputs.close()
        assert threading.active_count() == before, "the thread is still alive"
        assert err.end() == b"child %d\n" % grandchild
    finally:
        os.kill(grandchild, 9)


def test_a_grandchild_writes_forever(tmp_path: Path, out: Console, err: Console) -> None:
    files = _files(tmp_path, 2)
    dest = LogsDest(stderrs={1: files[1]}, tee_stderrs={1: files[1]})
    outputs = Outputs(dest, range(2), {1: "[1]:"}, out.fd, err.fd)
    code = "import os\nos.write(2, b'worker\\n')\nif os.fork() == 0:\n  while os.write(2, b'again\\n'): pass\n"
    workers = [_start(outputs, rank, f"import os; os.setsid()\n{code}") for rank in (0, 1)]
    for worker in workers:
        worker.wait(DEADLINE)
    outputs.close()
    try:
        lines = err.end().split(b"\n")
        assert lines.count(b"worker") == lines.count(b"[1]:worker") == 1
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, 9)


def test_marks(tmp_path: Path, out: Console, err: Console) -> None:

    dest = LogsDest(stdouts={1: str(tmp_path / "out"), 2: os.devnull})
    outputs = Outputs(dest, range(3), {}, stdout=out.fd, stderr=err.fd)
    code = "import os, sys; sys.stdin.read(); os.write(1, b'x')"
    marks = [_marks(outputs)]
    for rank in range(3):
        stdout, stderr = outputs.of[rank].worker_ends
        command = [sys.executable, "-S", "-c", code]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
        outputs.of[rank].close_worker_ends()
        assert _marks(outputs) == marks[-1], "no output yet"
        worker.communicate(b"", DEADLINE)
        until(lambda: _marks(outputs) != marks[-1], f"the output of rank {rank}")
        marks.append(_marks(outputs))
    outputs.close()
    assert (out.end(), err.end(), (tmp_path / "out").read_bytes()) == (b"x", b"", b"x")


def test_a_terminal() -> None:
    import termios
    import tty

    console = Console(terminal=True)
    try:
        tty.setraw(console.fd)
        termios.tcsetwinsize(console.fd, (33, 77))
        outputs = Outputs(LogsDest(), range(1), {}, stdout=1, stderr=console.fd)
        code = """
import os, sys
os.write(2, f"{sys.stderr.isatty()} {tuple(os.get_terminal_size(2))}\\n".encode())
for number in range(2000):
    os.write(2, b"%d\\r" % number)
os.write(2, bytes(range(256)))
os._exit(1)
"""
        _start(outputs, 0, code).wait(DEADLINE)
        expected = b"True (77, 33)\n" + b"".join(b"%d\r" % number for number in range(2000)) + bytes(range(256))
        assert outputs.of[0].last_lines() == expected
        outputs.close()
        console.wait_for(lambda got: len(got) >= len(expected))
    finally:
        got = console.end()
    assert got == expected


def test_hidden_ranks(tmp_path: Path, out: Console, err: Console) -> None:
    code = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\n')"
    teed = {0: str(tmp_path / "0")}
    dest = LogsDest(stdouts=teed, stderrs={0: os.devnull})
    outputs = Outputs(dest, range(2), {0: "[0]:", 1: "[1]:"}, out.fd, err.fd)
    _start(outputs, 0, code).wait(DEADLINE)
    outputs.close()
    assert outputs.of[0].last_lines() == b"err\n"
    assert (tmp_path / "0").read_bytes() == b"out\n"
    outputs = Outputs(LogsDest(stdouts={0: os.devnull}, stderrs={0: os.devnull}), range(1), {}, out.fd, err.fd)
    _start(outputs, 0, code).wait(DEADLINE)
    outputs.close()
    assert (outputs.of[0].last_stdout(), outputs.of[0].last_lines()) == (b"out\n", b"err\n")
    assert out.end() == err.end() == b""


LOUD = """
import sys, time
try:
    while True:
        print("word", file=sys.stderr, flush=True)
        time.sleep(0.001)
except BrokenPipeError:
    import os
    os._exit(7)
"""


@pytest.mark.parametrize("socket", [False, True])
@pytest.mark.parametrize("already", [False, True])
def test_a_closed_console_breaks_the_worker_s_pipe(already: bool, socket: bool) -> None:
    """As with `2>&1 | head`."""
    reading, writing = (end.detach() for end in socketpair()) if socket else os.pipe()
    if already:
        os.close(reading)
    outputs = Outputs(LogsDest(), range(1), {}, stdout=writing, stderr=writing)
    os.close(writing)
    worker = _start(outputs, 0, LOUD)
    try:
        if not already:
            assert os.read(reading, 4) == b"word"
            os.close(reading)
        assert worker.wait(DEADLINE) == 7
    finally:
        worker.kill()
        worker.wait()
    assert b"word" in outputs.of[0].last_lines() or already
    outputs.close()


def test_a_console_that_cannot_be_written() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        outputs = Outputs(LogsDest(), range(1), {}, stdout=full.fileno(), stderr=full.fileno())
        assert _start(outputs, 0, GARBAGE + "[sys.stderr.buffer.write(data) for _ in range(20)]").wait(DEADLINE) == 0
        assert outputs.of[0].last_lines() == _garbage()[-64 * 1024 :]
        outputs.close()
        closed = full.fileno()
    outputs = Outputs(LogsDest(), range(1), {}, stdout=closed, stderr=closed)
    assert _start(outputs, 0, "import os; os.write(2, b'words\\n')").wait(DEADLINE) == 0
    assert outputs.of[0].last_lines() == b"words\n"
    outputs.close()


def test_long_lines_on_a_slow_console(tmp_path: Path, out: Console) -> None:
    """A pipe accepts partial writes; a non-blocking one sometimes none."""
    files = _files(tmp_path, 2)
    os.set_blocking(out.fd, False)
    outputs = Outputs(LogsDest(stdouts=files, tee_stdouts=files), range(2), {0: "[0]:", 1: "[1]:"}, out.fd, 2)
    code = """
import os, sys
name, at = sys.argv[1].encode(), 0
data = b"".join(name * (number * 37 % 20_000) + b" %d\\n" % number for number in range(500))
while at < len(data):
    at += os.write(1, data[at:at + 100_000])
"""
    for worker in [_start(outputs, rank, code, name) for rank, name in enumerate("ab")]:
        assert worker.wait(DEADLINE) == 0
    outputs.close()
    got = out.end().split(b"\n")
    for prefix, name in ((b"[0]:", b"a"), (b"[1]:", b"b")):
        expected = [prefix + name * (number * 37 % 20_000) + b" %d" % number for number in range(500)]
        assert [line for line in got if line.startswith(prefix)] == expected
    assert len(got) == 1001


def test_a_blocked_stdout_does_not_block_stderr(tmp_path: Path, err: Console) -> None:
    reading, writing = os.pipe()
    outs, errs = {0: str(tmp_path / "out")}, {0: str(tmp_path / "err")}
    dest = LogsDest(stdouts=outs, tee_stdouts=outs, stderrs=errs, tee_stderrs=errs)
    outputs = Outputs(dest, range(1), {0: "[0]:"}, writing, err.fd)
    os.close(writing)
    code = "import os; [os.write(1, b'x' * 99_999 + b'\\n') for _ in range(10)]; os.write(2, b'seen\\n')"
    _start(outputs, 0, code).wait(DEADLINE)
    err.wait_for(lambda got: got == b"[0]:seen\n")
    with open(reading, "rb") as console:
        closer = threading.Thread(target=outputs.close)
        closer.start()
        assert console.read() == (b"[0]:" + b"x" * 99_999 + b"\n") * 10
        closer.join(DEADLINE)


def test_closing_with_a_blocked_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.2)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)
    outputs = Outputs(LogsDest(), range(1), {}, stdout=writing, stderr=writing)
    os.close(writing)
    written = _garbage()[:60_000]  # fits into the worker's pipe
    assert _start(outputs, 0, GARBAGE + "sys.stderr.buffer.write(data[:60_000])").wait(DEADLINE) == 0
    assert outputs.of[0].last_lines() == written
    outputs.close()
    with open(reading, "rb") as console:  # the rest arrives later
        assert console.read() == written


def test_a_blocked_console_does_not_look_like_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for the console is not silent."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 10 * DEADLINE)
    reading, writing = os.pipe()
    outputs = Outputs(LogsDest(), range(1), {}, stdout=writing, stderr=writing)
    os.close(writing)
    worker = _start(outputs, 0, "while True: print('x' * 1000)")
    relay = outputs.of[0].relays[0]
    assert relay is not None
    until(lambda: outputs.console.blocked_for() > 0.2 and relay.unread() >= 32 * 1024)
    first, second = _marks(outputs), _marks(outputs)
    assert first != second
    assert outputs.of[0].age() == 0.0
    worker.kill()
    worker.wait(DEADLINE)
    began = time.monotonic()
    outputs.close()
    assert time.monotonic() - began < DEADLINE
    with open(reading, "rb") as console:
        assert set(console.read()) <= set(b"x\n")


def test_nothing_leaks(tmp_path: Path, out: Console, err: Console) -> None:
    files = _files(tmp_path, 2)
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        outputs = Outputs(LogsDest(stdouts=files, tee_stdouts=files), range(2), {}, out.fd, err.fd)
        _start(outputs, 0, "print('x')").wait(DEADLINE)  # the other worker is never started
        outputs.close()
        outputs.close()
    with pytest.raises(UserError, match=r"missing.*No such file.*--log-dir"):
        Outputs(LogsDest(stdouts={0: files[0], 1: str(tmp_path / "missing" / "log")}), range(2), {}, out.fd, err.fd)
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def _wakeups(thread: threading.Thread) -> int:
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


FLOOD_AND_LOG = """
import os, subprocess, sys
from rallypoint.base.log import configure, get_logger
from rallypoint.workers.logs.outputs import WorkerConsole
from rallypoint.workers.logs.specs import LogsDest
configure()
file = {0: sys.argv[1]}
console = WorkerConsole(2, 2)
outputs = console.open(LogsDest(stdouts=file, tee_stdouts=file), [0], {0: "[0]:"})
flood = "import os; os.write(1, b''.join(b'%d of the flood, which is long\\\\n' % line for line in range(60_000)))"
worker = subprocess.Popen([sys.executable, "-c", flood], stdout=outputs[0].worker_ends[0])
worker.wait()
print("written", flush=True)
for number in range(300):
    get_logger("rallypoint.test").warning("word %d of ours", number)
console.end(outputs.values())
console.close()
"""


def test_log_lines_do_not_split_lines_of_workers(tmp_path: Path) -> None:
    """The console is a pipe that accepts partial writes."""
    command = [sys.executable, "-c", FLOOD_AND_LOG, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stderr is not None
        assert agent.stdout.readline() == b"written\n"
        got = agent.stderr.read().decode().splitlines()
    assert agent.returncode == 0
    teed = [line for line in got if line.startswith("[0]:")]
    assert teed == [f"[0]:{line} of the flood, which is long" for line in range(60_000)]
    ours = [line for line in got if not line.startswith("[0]:")]
    assert [line.partition("] ")[2] for line in ours] == [f"word {number} of ours" for number in range(300)]


def test_polling_without_inotify(tmp_path: Path, out: Console, err: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Inotify, "watch", denied)
    files = _files(tmp_path, 2)
    outputs = Outputs(LogsDest(stdouts=files, tee_stdouts=files), range(2), {0: "[0]:", 1: "[1]:"}, out.fd, err.fd)
    shown = b""
    for rank, line in ((0, b"one"), (1, b"two"), (0, b"three")):
        with open(files[rank], "ab") as file:
            file.write(line + b"\n")
        shown += b"[%d]:%s\n" % (rank, line)
        out.wait_for(lambda got, shown=shown: got == shown)  # type: ignore[misc]
    with open(files[0], "ab") as file:
        file.write(b"four\n")
    outputs.close()
    assert out.end().endswith(b"[0]:four\n")


def test_an_unreadable_file(tmp_path: Path, out: Console, err: Console) -> None:
    files = _files(tmp_path, 2)
    # A folder can be opened like a file; reading it fails with EISDIR.
    dest = LogsDest(stdouts=files, tee_stdouts={0: str(tmp_path), 1: files[1]})
    outputs = Outputs(dest, range(2), {0: "lost", 1: "[1]:"}, out.fd, err.fd)
    _start(outputs, 1, "print('one')").wait(DEADLINE)
    out.wait_for(lambda got: got == b"[1]:one\n")
    outputs.close()
    assert out.end() == b"[1]:one\n"


# Several starts of workers


def _pumps() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rallypoint-output"]


@pytest.fixture
def console(out: Console) -> Iterator[WorkerConsole]:
    """Both streams are `out`."""
    made = WorkerConsole(out.fd, out.fd)
    yield made
    made.close()


@pytest.mark.usefixtures("no_grace")
def test_starts_share_the_thread_and_the_scheduler(tmp_path: Path, out: Console, console: WorkerConsole) -> None:
    first = console.open(LogsDest(), [0], {})
    waiting = _start_worker(first[0], "import os; os.write(2, b'half '); input(); os.write(2, b'line\\n')", stdin=-1)
    out.wait_for(lambda got: got == b"half ")
    files = _files(tmp_path, 1)
    second = console.open(LogsDest(stdouts=files, tee_stdouts=files), [0], {0: "[0]:"})
    assert len(_pumps()) == 1
    _start_worker(second[0], "print('whole')").wait(DEADLINE)
    waiting.communicate(b"\n", DEADLINE)
    out.wait_for(lambda got: got == b"half line\n[0]:whole\n")
    console.end([*first.values(), *second.values()])


@pytest.mark.usefixtures("no_grace")
def test_ending_some_workers_during_a_line_of_others(out: Console, console: WorkerConsole) -> None:
    outputs = console.open(LogsDest(), [0, 1], {})
    waiting = _start_worker(outputs[0], "import os; os.write(2, b'half '); input()", stdin=-1)
    out.wait_for(lambda got: got == b"half ")
    _start_worker(outputs[1], "import os; os.write(2, b'last words')").wait(DEADLINE)
    console.end([outputs[1]])
    out.wait_for(lambda got: got == b"half last words")
    waiting.communicate(b"\n", DEADLINE)
    console.end(outputs.values())


def test_starts_leak_nothing(tmp_path: Path, out: Console, console: WorkerConsole) -> None:
    files = _files(tmp_path, 2)
    filtered = str(tmp_path / "filtered")
    dest = LogsDest(stdouts=files, tee_stdouts=files, filtered_stdout=filtered)
    shown, left = b"", set()
    for number in range(20):
        outputs = console.open(dest, [0, 1], {0: "[0]:", 1: "[1]:"}, filters=(["word"], None))
        _start_worker(outputs[0], f"print('word {number}')").wait(DEADLINE)  # the other worker is never started
        console.end(outputs.values())
        shown += b"[0]:word %d\n" % number
        assert Path(filtered).read_bytes() == b"[0]:word %d\n" % number
        left.add((frozenset(os.listdir("/proc/self/fd")), _watches(), len(_pumps())))
    assert len(left) == 1
    assert left.pop()[1:] == (0, 1)
    out.wait_for(lambda got: got == shown)


def _watches() -> int:
    """The number of files that inotify watches in this process."""
    found = 0
    for name in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):
            found += Path("/proc/self/fdinfo", name).read_text().count("inotify wd:")
    return found


def test_unread_output_of_several_starts_arrives_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 10 * DEADLINE)
    reading, writing = os.pipe()
    console = WorkerConsole(writing, writing)
    threads, lines = threading.active_count(), 20_000
    began = time.monotonic()
    for start in range(3):
        files = {0: str(tmp_path / str(start))}
        outputs = console.open(LogsDest(stdouts=files, tee_stdouts=files), [0], {0: f"[{start}]:"})
        code = f"import sys\nfor line in range({lines}): print(line)\nprint('last', file=sys.stderr)"
        _start_worker(outputs[0], code).wait(DEADLINE)
        assert outputs[0].last_lines() == b"last\n"
        console.end(outputs.values())
    os.close(writing)
    console.close()
    assert time.monotonic() - began < DEADLINE, "nothing waits for the console"
    assert threading.active_count() == threads + 1
    with open(reading, "rb") as pipe:
        got = pipe.read().splitlines()
    until(lambda: threading.active_count() == threads, "the thread ends after all output")
    assert got.count(b"last") == 3
    for start in range(3):
        mine = [line for line in got if line.startswith(b"[%d]:" % start)]
        assert mine == [b"[%d]:%d" % (start, line) for line in range(lines)]


def test_a_dead_worker_s_file_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.0)
    monkeypatch.setattr(module, "SLICE", 64 * 1024)
    reading, writing = os.pipe()
    console = WorkerConsole(writing, writing)
    files = {0: str(tmp_path / "0")}
    outputs = console.open(LogsDest(stdouts=files, tee_stdouts=files), [0, 1], {0: "[0]:"})
    os.close(writing)
    size = 8 * 1024 * 1024
    _start_worker(outputs[0], f"for _ in range({size // 64}): print('x' * 63)").wait(DEADLINE)
    living = _start_worker(outputs[1], "import os; os.write(2, b'alive\\n'); input()", stdin=-1)
    console.end([outputs[0]])
    with open(reading, "rb") as pipe:
        at, got = None, b""
        while chunk := pipe.read1(1 << 16):
            got += chunk
            if at is None and b"alive" in got:
                at = len(got)
                living.communicate(b"\n", DEADLINE)
                console.end(outputs.values())
                closer = threading.Thread(target=console.close)
                closer.start()
    closer.join(DEADLINE)
    assert got.count(b"x" * 63) == size // 64
    assert at is not None
    assert at < len(got) / 2


def test_the_next_start_after_an_internal_error(
    out: Console, console: WorkerConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a defect")

    first = console.open(LogsDest(), [0], {})
    with monkeypatch.context() as patch:
        patch.setattr(Pump, "_forward", fail)
        assert _start_worker(first[0], LOUD).wait(DEADLINE) == 7, "like an unread console"
    console.end(first.values())
    second = console.open(LogsDest(), [0], {})
    _start_worker(second[0], "import os; os.write(2, b'seen')").wait(DEADLINE)
    console.end(second.values())
    out.wait_for(lambda got: got.endswith(b"seen"))
    assert len(_pumps()) == 1


def test_a_pipe_shared_with_a_forked_process(out: Console, console: WorkerConsole) -> None:
    outputs = console.open(LogsDest(), [0, 1], {})
    gate, open_gate = os.pipe()
    end = outputs[0].worker_ends[1]
    assert end is not None
    copy = os.fork()
    if copy == 0:  # it shares all descriptors, like a worker that is a function
        os.close(open_gate)
        os.read(gate, 1)
        os.write(end, b"something")
        os.read(gate, 1)
        os._exit(0)
    os.close(gate)
    living = _start_worker(outputs[1], "input()", stdin=-1)
    console.end([outputs[0]])
    number = os.dup(1)  # reuses the closed descriptor
    os.write(open_gate, b"1")
    (thread,) = _pumps()
    select.select([], [], [], 0.2)
    before = _wakeups(thread)
    select.select([], [], [], 0.3)
    assert _wakeups(thread) == before
    os.close(open_gate)
    os.waitpid(copy, 0)
    os.close(number)
    living.communicate(b"\n", DEADLINE)
    console.end(outputs.values())


def test_pipes_have_the_default_size(tmp_path: Path, out: Console, err: Console) -> None:
    """A user may have 64 MiB of pipes, including those of data loaders."""
    reading, writing = os.pipe()
    usual = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    outputs = Outputs(LogsDest(), range(2), {}, out.fd, err.fd)
    try:
        ends = [fd for rank in range(2) for fd in outputs.of[rank].worker_ends if fd is not None]
        assert ends, "standard error is a pipe"
        assert {fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) for fd in ends} == {usual}
    finally:
        outputs.close()
        os.close(reading)
        os.close(writing)
