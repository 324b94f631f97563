"""Processes that a benchmark starts, what they print and when, and their certain end.

Laws:
    Every process started here, and whatever it starts in turn, carries one mark in its environment.
    A line's time is taken when it arrives, on the monotonic clock that all processes of this machine share.
    At the end of the block every marked process is gone; one that its own launcher left behind is named aloud.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.case import BenchError
from rallypoint.base.process_table import process_table

ROOT = Path(__file__).resolve().parent.parent
_BIN = Path(sys.executable).parent
_MARK = "RALLYBENCH_MARK"
_FOREIGN = ("PET_", "TORCH", "RALLYPOINT_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_")
_FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOGLEVEL", "PYTHON_EXEC", "USE_LIBUV"}
_GRACE = 20.0  # seconds from SIGTERM to SIGKILL; torchrun may take 10 to stop its workers
_WORDS = 2  # lines of a failed process that a message repeats
_ORPHAN_GRACE = 2.0  # seconds in which what a launcher had stopped may still be dying
_KILL_GRACE = 30.0  # seconds that the kernel has to end what was killed


def launcher(name: str) -> str:
    """The path of an installed command (`rallyrun`, `torchrun`) beside this interpreter.

    Raises:
        BenchError: it is not installed there.
    """
    path = _BIN / name
    if not path.exists():
        raise BenchError(f"{path} does not exist; install the project with its test extras first")
    return str(path)


def program(name: str, *arguments: str) -> list[str]:
    """The command line of a program of `benchmarks/programs`, run by this interpreter."""
    return [sys.executable, "-m", f"benchmarks.programs.{name}", *arguments]


def clean_environment() -> dict[str, str]:
    """Our environment without anything that steers either launcher or its workers, one thread for each worker."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


class Child:
    """One started process: its pipes, and the beginning of a line that is not finished yet."""

    def __init__(self, name: str, argv: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.partial = b""

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def tell(self, line: bytes) -> None:
        """Write one line to the process's standard input.

        Raises:
            BenchError: the process has gone.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name} has gone before it could be told what to do: {self.last_words()}") from None

    def has_written(self, words: str, times: int = 1) -> bool:
        """Whether it has written these words to standard error, so many times."""
        # At a place of our own: the file's position is the process's too.
        text = os.pread(self._stderr.fileno(), os.fstat(self._stderr.fileno()).st_size, 0)
        return text.count(words.encode()) >= times

    def last_words(self) -> str:
        """The end of what it wrote to standard error, in one line."""
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return " | ".join(text.splitlines()[-_WORDS:]) or "nothing on standard error"

    def close(self) -> None:
        """Give its pipes back; the process must have ended."""
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a child's standard output; `at` is its arrival in seconds on the monotonic clock."""

    at: float
    child: Child
    text: str


class Children:
    """The processes of one measurement; at the end of the `with` block all are stopped and their absence is checked."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._lines: deque[Line] = deque()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start(self, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> Child:
        """Start a process in a session of its own, with pipes for standard input and output.

        Args:
            name: how messages call it.
            argv: its command line; it runs in the repository's root with a clean, marked environment.
            env: more variables for it.
        """
        child = Child(name, argv, {**clean_environment(), **(env or {}), _MARK: self._mark})
        self._children.append(child)
        assert child.process.stdout is not None
        os.set_blocking(child.process.stdout.fileno(), False)
        self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
        return child

    def expect_end(self, child: Child) -> None:
        """The end of this child is no surprise any more; what it still prints is not read."""
        assert child.process.stdout is not None
        with suppress(KeyError):
            self._selector.unregister(child.process.stdout)

    def next_line(self, deadline: float, awaited: str) -> Line:
        """The next line that any child prints.

        Args:
            deadline: a moment on the monotonic clock.
            awaited: what the line is expected to tell, for the message if it does not come.

        Raises:
            BenchError: the deadline passed, or a child closed its standard output before.
        """
        while not self._lines:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                words = "; ".join(f"{child.name} said: {child.last_words()}" for child in self._children)
                raise BenchError(f"{awaited} did not come in time; {words}")
            for key, _ in ready:
                self._read(key.data, awaited)
        return self._lines.popleft()

    def one_line_each(self, children: Collection[Child], deadline: float, awaited: str) -> dict[Child, Line]:
        """The next line of each of `children`; lines of others are dropped. Raises as `next_line`."""
        found: dict[Child, Line] = {}
        while len(found) < len(children):
            line = self.next_line(deadline, awaited)
            if line.child in children:
                found.setdefault(line.child, line)
        return found

    def _read(self, child: Child, awaited: str) -> None:
        assert child.process.stdout is not None
        chunk = os.read(child.process.stdout.fileno(), 65536)
        at = time.monotonic()
        if not chunk:
            self._selector.unregister(child.process.stdout)
            raise BenchError(f"{child.name} ended before {awaited}; it said: {child.last_words()}")
        *lines, child.partial = (child.partial + chunk).split(b"\n")
        self._lines.extend(Line(at, child, line.decode(errors="replace")) for line in lines)

    def _stop(self) -> None:
        self._selector.close()
        for child in self._children:
            child.process.terminate()
        deadline = time.monotonic() + _GRACE
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{child.name} ignored SIGTERM for {_GRACE:.0f} s and was killed", file=sys.stderr)
                child.process.kill()
                child.process.wait()
            child.close()
        self._sweep()

    def _sweep(self) -> None:
        """Kill what outlived its launcher, by pid, and say so; wait until nothing marked is left.

        Raises:
            BenchError: something cannot be killed.
        """
        named: set[int] = set()
        grace = time.monotonic() + _ORPHAN_GRACE
        while left := list(_marked(self._mark)):
            if time.monotonic() > grace + _KILL_GRACE:
                raise BenchError(f"the processes {left} were killed and are still there; look at their state in /proc")
            if time.monotonic() > grace:
                for pid in left:
                    if pid not in named:
                        print(f"process {pid} ({_command(pid)}) outlived its launcher and was killed", file=sys.stderr)
                    named.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{_MARK}={mark}".encode()
    for pid in process_table():
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                yield pid


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "already gone"


def descendants(pid: int) -> list[int]:
    """The processes below `pid` at this moment, children and theirs."""
    parents = {pid: stat.parent for pid, stat in process_table().items()}
    found: list[int] = []
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found.extend(sorted(frontier))
    return found
