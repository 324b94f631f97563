"""Launches of a program of `examples/frameworks`, disturbed at a known step.

The program prints each step into a pipe that holds one line, so it cannot get more than two lines ahead of the reader.
So a disturbance at a step happens at that step, however fast the steps are and however slow this process is.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import F_SETFL, F_SETPIPE_SZ, fcntl
from pathlib import Path
from typing import NamedTuple

from rallypoint.notices import NOTICE_FILE
from tests.environment import undisturbed
from tests.frameworks.programs import VARIABLES, Program
from tests.ports import free_port
from tests.processes import command_line

STEPS, EVERY, KILLED_AT, STOPPED_AT = 60, 20, 25, 45
DEADLINE = 240.0
"""Seconds after which a launch is given up."""
_MARK = "RALLYPOINT_FRAMEWORKS_RUN"
"""Names a variable that every process of a launch carries, so that none can be left behind unseen."""
_STEP, _FINAL = re.compile(rb"step (\d+) "), re.compile(rb"final loss ([0-9.]+)")
_BEGUN, _NOT_PRELOADED = re.compile(rb"(\d+) workers, from step (\d+)"), re.compile(r"start without preloading: (.*)")


class Outcome(NamedTuple):
    """How a launch ended."""

    loss: float | None
    codes: list[int]
    """Exit codes of the agents, in the order of their start; negative for a signal."""
    begun: list[tuple[int, int]]
    """Number of workers, and the step from which they went on, each time that they began."""
    seconds: float
    recovery: float | None
    """Seconds from the kill to the next step, None where nothing was killed."""
    left: list[str]
    """What is still there: processes, and files of Rallypoint's."""
    said: str
    """All that was printed."""

    @property
    def not_preloaded(self) -> str:
        """Why workers were not forked from what was preloaded; empty where they were, or nothing was asked."""
        found = _NOT_PRELOADED.search(self.said)
        return found[1] if found else ""


class Launch:
    """One job of one or more agents."""

    def __init__(self, program: Program, folder: Path, saved: Path) -> None:
        self._program = program
        self._mark = uuid.uuid4().hex
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._folder, self._errors = folder, folder / "stderr"
        self._saved = saved
        self._agents: list[subprocess.Popen[bytes]] = []
        self._pipe, written = os.pipe2(os.O_CLOEXEC)
        os.close(written)  # each agent gets an end of its own: the pipe ends when the last process of the launch has
        fcntl(self._pipe, F_SETPIPE_SZ, os.sysconf("SC_PAGE_SIZE"))
        self._began = time.monotonic()
        self._recovery: float | None = None
        self._out = b""

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start one more agent."""
        python = self._program.python()
        assert python is not None
        own = {_MARK: self._mark, "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}
        # Without its preemption service, JAX leaves SIGTERM alone.
        jax = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_PREEMPTION_SERVICE": "false"}
        options = (f"--steps={STEPS}", f"--every={EVERY}", f"--checkpoint-dir={self._saved}")
        command = [str(Path(sys.executable).with_name("rallyrun")), "--max-restarts=3", *self._program.flags, *flags]
        written = os.open(f"/proc/self/fd/{self._pipe}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            fcntl(written, F_SETFL, os.O_DIRECT)  # packets: each of them takes a place of the pipe, and there is one
            with self._errors.open("ab") as errors:
                agent = subprocess.Popen(
                    [*command, str(self._program.script), *options],
                    stdout=written,
                    stderr=errors,
                    env={**undisturbed(), **own, **VARIABLES, **jax},
                    cwd=self._folder,
                )
        finally:
            os.close(written)
        self._agents.append(agent)
        return agent

    def at_step(self, step: int) -> None:
        """Read until rank 0 is at a step.

        Raises:
            AssertionError: the launch ends before.
        """
        if not self._read_until(lambda out: any(int(each) >= step for each in _STEP.findall(out))):
            raise AssertionError(f"the launch ended before step {step}:\n{self._said()}")

    def kill(self, pid: int) -> None:
        """SIGKILL, and take the time until the next step of workers that have begun again.

        There may be none: what is killed has an end a moment later, in which the others can do the last step. Then this
        reads to the end of the launch.
        """
        begun, at = len(_BEGUN.findall(self._out)), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if self._read_until(lambda out: _steps_of_beginning(out, begun)):
            self._recovery = time.monotonic() - at

    def last_worker(self) -> int:
        """The worker that was started last, which is that of the highest rank of its agent."""
        workers = [pid for pid in self._processes() if _is_worker(pid, str(self._program.script))]
        assert workers, f"the launch has no worker:\n{self._said()}"
        return max(workers)

    def until_notified(self) -> None:
        """Wait until the workers can see a notice; meanwhile they wait for us to read what they print."""
        environment = Path(f"/proc/{self.last_worker()}/environ").read_bytes().split(b"\0")
        (folder,) = (each.partition(b"=")[2] for each in environment if each.startswith(b"RALLYPOINT_NOTICES="))
        while not Path(os.fsdecode(folder), NOTICE_FILE).exists():
            assert time.monotonic() < self._began + DEADLINE, self._said()
            time.sleep(0.005)

    def outcome(self) -> Outcome:
        """Read to the end."""
        self._read_until(lambda out: False)
        codes, seconds = [agent.wait(DEADLINE) for agent in self._agents], time.monotonic() - self._began
        final = _FINAL.findall(self._out)
        begun_at = [(int(workers), int(step)) for workers, step in _BEGUN.findall(self._out)]
        loss = float(final[-1]) if final else None
        return Outcome(loss, codes, begun_at, seconds, self._recovery, list(self._left()), self._said())

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in list(self._processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self._agents:
            agent.kill()
            agent.wait()
        os.close(self._pipe)

    def _read_until(self, holds: Callable[[bytes], bool]) -> bool:
        """Read standard output until something holds of it; False if it ends before."""
        while not holds(self._out):
            left = self._began + DEADLINE - time.monotonic()
            if not select.select([self._pipe], [], [], max(0.0, left))[0]:
                raise AssertionError(f"the launch did not end within {DEADLINE:.0f} s:\n{self._said()}")
            data = os.read(self._pipe, 1 << 16)
            if not data:
                return False
            self._out += data
        return True

    def _said(self) -> str:
        return (self._out + self._errors.read_bytes()).decode(errors="replace")

    def _left(self) -> Iterator[str]:
        for pid in self._processes():
            yield f"process {pid} ({command_line(pid)[:200]})"
        for each in self._temporary.glob("*torchelastic*"):
            yield f"file {each.name}"

    def _processes(self) -> Iterator[int]:
        wanted = f"{_MARK}={self._mark}".encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):
                    if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        yield int(name)


def _steps_of_beginning(out: bytes, number: int) -> bool:
    """Whether the workers that began for the nth time, from 0 on, have told of a step."""
    begun = list(_BEGUN.finditer(out))
    return len(begun) > number and _STEP.search(out, begun[number].end()) is not None


def _is_worker(pid: int, script: str) -> bool:
    command = command_line(pid)
    with suppress(OSError):
        preloading = Path(f"/proc/{pid}/comm").read_text().startswith("rally-zygote")
        return script in command and "rallyrun" not in command and not preloading
    return False


class Runs:
    """Launches of one program, each with checkpoints of its own unless said otherwise."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self._folder = folder

    @contextmanager
    def launched(self, saved: Path | None = None) -> Iterator[Launch]:
        """A launch to which agents can be added; whatever happens, nothing of it stays."""
        folder = Path(tempfile.mkdtemp(prefix="l-", dir=self._folder))
        launch = Launch(self.program, folder, saved or folder / "saved")
        try:
            yield launch
        finally:
            launch.end()
            shutil.rmtree(folder, ignore_errors=True)

    def undisturbed(self, *flags: str, saved: Path | None = None) -> Outcome:
        """Two workers of one agent."""
        with self.launched(saved) as launch:
            launch.start("--standalone", "--nproc-per-node=2", *flags)
            return launch.outcome()

    def worker_killed(self, *flags: str) -> Outcome:
        """Two workers of one agent, of which one is killed."""
        with self.launched() as launch:
            launch.start("--standalone", "--nproc-per-node=2", *flags)
            launch.at_step(KILLED_AT)
            launch.kill(launch.last_worker())
            return launch.outcome()

    def preloaded(self) -> Outcome:
        """As `worker_killed`, where the new workers are forked from a process that has imported the framework."""
        return self.worker_killed(f"--preload={self.program.preload}")

    def killed_and_stopped(self) -> tuple[Outcome, Outcome]:
        """One of two workers is killed, later all are told of a stop; a second launch goes on from what they saved."""
        saved = Path(tempfile.mkdtemp(prefix="s-", dir=self._folder))
        with self.launched(saved) as launch:
            agent = launch.start("--standalone", "--nproc-per-node=2", "--preempt-signals=SIGUSR2")
            launch.at_step(KILLED_AT)
            launch.kill(launch.last_worker())
            launch.at_step(STOPPED_AT)
            agent.send_signal(signal.SIGUSR2)
            launch.until_notified()
            stopped = launch.outcome()
        return stopped, self.undisturbed(saved=saved)

    def node_killed(self) -> Outcome:
        """Two agents of one worker each; one is killed, and a spare takes its place."""
        meeting = (
            *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-id={uuid.uuid4().hex}"),
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        )
        with self.launched() as launch:
            launch.start(*meeting, "--rdzv-conf=is_host=true")
            victim = launch.start(*meeting, "--rdzv-conf=is_host=false")
            launch.at_step(1)
            launch.start(*meeting, "--rdzv-conf=is_host=false")
            launch.at_step(KILLED_AT)
            launch.kill(victim.pid)
            return launch.outcome()
