"""Starts real agents and returns their output; checks that nothing of them is left.

Every process that a test starts, with all its children, carries a mark of the test in its environment: by this mark,
the end of a test finds leftovers.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rallypoint.base.open_process import open_process
from tests.environment import JOBS, undisturbed
from tests.waiting import until_stopped

TIMEOUT = float(os.environ.get("RALLYPOINT_TEST_TIMEOUT", "120"))
"""Seconds that a test waits for what must happen; more where torch is to answer everything at once."""
_MARK = "RALLYPOINT_TEST_MARK"
PRELOAD = os.environ.get("RALLYPOINT_TEST_PRELOAD", "")
"""What each rallyrun under test is to import ahead (`make conformance-preload`); torchrun does not know the
variable."""
RALLYRUN = [sys.executable, "-m", "rallypoint.run"]
RALLYCTL = [sys.executable, "-m", "rallypoint.cli.rallyctl"]
_SIDE_BY_SIDE = 6
"""Scenarios that `run_at_once` has under way at a time: they mostly wait, and more would make other tests late."""


def readable(fd: int, seconds: float | None = None) -> bool:
    """Wait until a descriptor can be read, or for so many seconds; `select.select` takes none above 1,023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


class _Lines:
    """The lines of a pipe that is read as it fills; whoever holds the lock of its job may look and read."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        # Workers may write any bytes; `os.fsencode` gives them back.
        utf_8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._decoder = io.IncrementalNewlineDecoder(utf_8, translate=True)
        self._begun: list[str] = []
        self.lines: list[str] = []
        self.over = False

    def wait(self) -> None:
        """Wait until there is something to read, or the end."""
        readable(self._pipe.fileno())

    def read(self) -> None:
        """Read what was written so far, without waiting."""
        if self.over or not readable(self._pipe.fileno(), 0.0):
            return
        data = os.read(self._pipe.fileno(), 1 << 20)  # more than a pipe holds
        self.over = not data
        *whole, rest = self._decoder.decode(data, final=self.over).split("\n")
        for end in whole:
            self.lines.append("".join([*self._begun, end]))
            self._begun.clear()
        self._begun.append(rest)
        if self.over and (last := "".join(self._begun)):
            self.lines.append(last)


class Job:
    """One running command, and all that it has printed.

    What was written before somebody looks is seen by the look, on whichever stream: a test may wait for a line on one
    of them and then go by what was written before it on the other.
    """

    def __init__(self, command: list[str], env: dict[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd, start_new_session=True
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self._out, self._err = _Lines(self._process.stdout), _Lines(self._process.stderr)
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in (self._out, self._err)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: _Lines) -> None:
        while not stream.over:
            stream.wait()
            self._look(stream)

    def _look(self, stream: _Lines) -> list[str]:
        with self._changed:
            stream.read()
            self._changed.notify_all()
            return list(stream.lines)

    @property
    def out(self) -> list[str]:
        """Lines of standard output so far."""
        return self._look(self._out)

    @property
    def err(self) -> str:
        """Standard error so far."""
        return "\n".join(self._look(self._err))

    def until(self, holds: Callable[[list[str]], bool], what: str) -> list[str]:
        """Wait until something holds of the lines of standard output."""
        with self._changed:
            if not self._changed.wait_for(lambda: holds(self._out.lines), TIMEOUT):
                raise AssertionError(f"after {TIMEOUT:.0f} s still not: {what}\n{self.out}\n{self.err}")
            return list(self._out.lines)

    def until_err(self, text: str, times: int = 1, *, or_end: bool = False) -> None:
        """Wait until so many lines of standard error hold a text; with `or_end`, or until it ends."""

        def holds() -> bool:
            return sum(text in line for line in self._err.lines) >= times or (or_end and self._err.over)

        with self._changed:
            if not self._changed.wait_for(holds, TIMEOUT):
                raise AssertionError(f"after {TIMEOUT:.0f} s standard error is still without {text!r}:\n{self.err}")

    def signal(self, number: int) -> None:
        """Send a signal to the agent; when this returns after SIGSTOP, it has stopped."""
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            until_stopped(self.pid)

    def ends(self) -> int:
        """Wait for the end, also of its output; returns the exit code, negative for a signal."""
        try:
            code = self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"after {TIMEOUT:.0f} s it has not ended\n{self.out}\n{self.err}") from error
        for reader in self._readers:
            reader.join(TIMEOUT)
            if reader.is_alive():  # to close what it reads from would wait for it
                raise AssertionError(
                    f"something still holds the output of a job that has ended with {code}:\n{self.err}"
                )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()
        return code

    def stop(self) -> None:
        """End it, if it runs, by the gentle way first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.ends()


class Launcher:
    """Starts jobs in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.jobs: list[Job] = []
        self._temporary = folder / "tmp"
        self._temporary.mkdir()

    def environment(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """What a job finds around it: ours without what could disturb, and the mark."""
        # torch's compiler may leave a cache in the temporary folder, which is not ours to take away.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        own = {
            _MARK: self.mark,
            "TMPDIR": str(self._temporary),
            JOBS: str(self._temporary),
            "OMP_NUM_THREADS": "1",
            **cache,
        }
        preload = {"PET_PRELOAD": PRELOAD} if PRELOAD else {}
        return {**undisturbed(), **own, **preload, **(env or {})}

    def __call__(self, *args: str, env: dict[str, str] | None = None) -> Job:
        """Start `rallyrun` with these arguments."""
        return self.command([*RALLYRUN, *args], env)

    def command(self, command: list[str], env: dict[str, str] | None = None) -> Job:
        """Start any command."""
        job = Job(command, self.environment(env), self.folder)
        self.jobs.append(job)
        return job

    def script(self, text: str, name: str = "script.py") -> str:
        """A worker's program."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def left(self) -> list[str]:
        """Processes with the mark that still run."""
        return [f"{pid}: {command}" for pid, command in self._marked()]

    def pids(self) -> list[int]:
        """All processes that carry the mark, in the order of their numbers."""
        return sorted(pid for pid, _ in self._marked())

    @staticmethod
    def until_gone(pid: int) -> None:
        """Wait until a process has ended, whether or not it has been reaped."""
        with suppress(ProcessLookupError):
            handle = open_process(pid)
            try:
                assert readable(handle.fileno(), TIMEOUT), f"process {pid} has not ended"
            finally:
                handle.close()

    def _marked(self) -> Iterator[tuple[int, str]]:
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if self.mark.encode() in environ and command:
                yield int(name), command

    def left_files(self) -> list[str]:
        """Temporary files that were not taken away, but for how jobs have ended."""
        found = sorted(str(path.relative_to(self._temporary)) for path in self._temporary.rglob("*"))
        return [each for each in found if not each.startswith(f"rallypoint-{os.geteuid()}")]


@contextmanager
def launching(folder: Path) -> Iterator[Launcher]:
    """A launcher, and the check that it leaves nothing behind."""
    launcher = Launcher(folder)
    try:
        yield launcher
    finally:
        try:
            for job in launcher.jobs:
                job.stop()
        finally:
            left = _settled(launcher.left)
            for entry in left:
                with suppress(ProcessLookupError):
                    os.kill(int(entry.split(":")[0]), signal.SIGKILL)
    assert not left, f"processes were left running: {left}"
    assert not launcher.left_files(), f"temporary files were left: {launcher.left_files()}"


def _settled(look: Callable[[], list[str]]) -> list[str]:
    """What is still there after a moment that the kernel may need to take processes away."""
    deadline = time.monotonic() + 30
    while (found := look()) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return found


AtOnce = Callable[..., None]
"""The type of the fixture `at_once`: it takes scenarios."""


def run_at_once(folder: Path, *scenarios: Callable[[Launcher], None]) -> None:
    """Run scenarios that mostly wait beside one another, a few at a time, so that they share their waits; each has a
    launcher.

    Args:
        folder: each launcher gets a folder below it.
        scenarios: what to run, each in a thread.

    Raises:
        ExceptionGroup: what went wrong in them, each with the name of its scenario.
    """

    def run(number: int, scenario: Callable[[Launcher], None]) -> Exception | None:
        own = folder / str(number)
        own.mkdir()
        try:
            with launching(own) as launcher:
                scenario(launcher)
        except Exception as error:
            error.add_note(f"in {getattr(scenario, '__name__', scenario)}")
            return error
        return None

    with ThreadPoolExecutor(min(len(scenarios), _SIDE_BY_SIDE)) as pool:
        found = list(pool.map(run, range(len(scenarios)), scenarios))
    failures = [error for error in found if error is not None]
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(scenarios)} scenarios failed", failures)
