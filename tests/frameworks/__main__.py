"""Each program of `examples/frameworks` with nothing lost, preloaded, with a worker killed, and with an agent killed.

    make frameworks

The final number of a disturbed run must be that of the undisturbed one, and nothing may be left: no process, no file of
Rallypoint's. The frameworks live in an environment of their own; the workers' interpreter is `PYTHON_EXEC`.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
MARK = "RALLYPOINT_FRAMEWORKS_RUN"
"""Names a variable that every process of a run carries, so that none can be left behind unseen."""
STEPS, EVERY, KILL_AT = 200, 20, 70
DEADLINE = 240.0
"""Seconds after which a run is given up."""
TOLERANCE = 1e-6

PRELOADS = {"jax_psum": "jax", "fsdp2_checkpoint": "torch", "nanogpt": "torch"}
"""What to import ahead for each program; `torch` where nothing is named."""

_STEP, _FINAL = re.compile(rb"^step (\d+)", re.M), re.compile(rb"final loss ([0-9.]+)")


class Outcome(NamedTuple):
    """How a run ended."""

    loss: float | None
    seconds: float
    recovery: float | None
    """Seconds from the kill to the next step, None where nothing was killed."""
    not_preloaded: str
    """Why workers were not forked from what was preloaded; empty where they were, or nothing was asked."""
    left: list[str]
    output: bytes


class Run:
    """One job of one or more agents."""

    def __init__(self, program: str, flags: Sequence[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._command = [str(Path(sys.executable).with_name("rallyrun")), "--max-restarts=3", *flags]
        self._script = [str(EXAMPLES / f"{program}.py"), f"--steps={STEPS}", f"--checkpoint-dir={folder / 'saved'}"]
        if "--every" in (EXAMPLES / f"{program}.py").read_text():
            self._script.append(f"--every={EVERY}")
        self._agents: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self.output = b""

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start one more agent."""
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary)}
        agent = subprocess.Popen(
            [*self._command, *flags, *self._script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=self._folder,
        )
        assert agent.stdout is not None
        os.set_blocking(agent.stdout.fileno(), False)
        self._selector.register(agent.stdout, selectors.EVENT_READ)
        self._agents.append(agent)
        return agent

    def read_until(self, wanted: Callable[[bytes], bool]) -> bool:
        """Read output until `wanted` holds for what has come from here on; False if all agents end before."""
        begin = len(self.output)
        while not wanted(self.output[begin:]):
            if not self._selector.get_map():
                return False
            left = self._began + DEADLINE - time.monotonic()
            ready = self._selector.select(max(0.0, left))
            if not ready:
                raise TimeoutError(f"the run did not end within {DEADLINE:.0f} s")
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._selector.unregister(key.fileobj)
                self.output += data
        return True

    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def workers(self) -> list[int]:
        """Pids of the workers; which is which cannot be told of one that was forked."""
        return [pid for pid in self._processes() if _is_worker(pid)]

    def left(self) -> list[str]:
        """What is still there of the run: processes, and files of Rallypoint's."""
        processes = [f"process {pid} ({_command(pid)})" for pid in self._processes()]
        return processes + [f"file {each.name}" for each in self._temporary.glob("*torchelastic*")]

    def end(self) -> None:
        """Kill whatever is left of the run."""
        for pid in list(self._processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self._agents:
            agent.kill()
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()
        self._selector.close()

    def _processes(self) -> Iterator[int]:
        wanted = f"{MARK}={self.mark}".encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):
                    if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        yield int(name)


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "gone"


def _is_worker(pid: int) -> bool:
    command = _command(pid)
    with suppress(OSError):
        preloading = Path(f"/proc/{pid}/comm").read_text().startswith("rally-zygote")
        return str(EXAMPLES) in command and "rallyrun" not in command and not preloading
    return False


@contextmanager
def running(program: str, *flags: str) -> Iterator[Run]:
    """A run in a folder of its own; whatever happens, nothing of it stays."""
    folder = Path(tempfile.mkdtemp(prefix="fw-"))
    run = Run(program, flags, folder)
    try:
        yield run
    finally:
        run.end()
        shutil.rmtree(folder, ignore_errors=True)


def past(step: int) -> Callable[[bytes], bool]:
    """Whether a worker has told of `step` or a later one."""
    return lambda text: any(int(each) >= step for each in _STEP.findall(text))


def finish(run: Run, killed_at: float | None = None) -> Outcome:
    """Read to the end; `killed_at` is the moment on `run.seconds()` at which something was killed."""
    recovery = None
    if killed_at is not None and run.read_until(_goes_back_from(run.output)):
        recovery = run.seconds() - killed_at
    run.read_until(lambda text: False)
    found = _FINAL.findall(run.output)
    why = re.search(rb"start without preloading: (.*)", run.output)
    return Outcome(
        float(found[-1]) if found else None,
        run.seconds(),
        recovery,
        why.group(1).decode(errors="replace") if why else "",
        run.left(),
        run.output,
    )


def _goes_back_from(told: bytes) -> Callable[[bytes], bool]:
    """Whether steps are told again, as a resumed run does; what the killed one has told may come late, but goes on."""
    last = [int(each) for each in _STEP.findall(told)][-1:]

    def goes_back(text: bytes) -> bool:
        return any(later <= former for former, later in pairwise([*last, *map(int, _STEP.findall(text))]))

    return goes_back


def undisturbed(program: str) -> Outcome:
    """Two workers of one agent."""
    with running(program, "--standalone", "--nproc-per-node=2") as run:
        run.start()
        return finish(run)


def worker_killed(program: str, *flags: str) -> Outcome:
    """Two workers of one agent, of which one is killed half-way."""
    with running(program, "--standalone", "--nproc-per-node=2", *flags) as run:
        run.start()
        run.read_until(past(KILL_AT))
        victim = max(run.workers())
        killed_at = run.seconds()
        os.kill(victim, signal.SIGKILL)
        return finish(run, killed_at)


def preloaded(program: str) -> Outcome:
    """As `worker_killed`, where the new workers are forked from a process that has imported the framework."""
    return worker_killed(program, f"--preload={PRELOADS.get(program, 'torch')}")


def _endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def three_agents(program: str, *, kill: bool) -> Outcome:
    """Three agents of one worker each; one is killed, and a fourth one, a spare, keeps the world as large as it was."""
    meeting = ["--nnodes=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={_endpoint()}", f"--rdzv-id={uuid.uuid4().hex}"]
    with running(program, *meeting) as run:
        agents = [run.start(f"--rdzv-conf=is_host={'true' if number == 0 else 'false'}") for number in range(3)]
        if not kill:
            return finish(run)
        run.read_until(past(1))
        run.start("--rdzv-conf=is_host=false")
        run.read_until(past(KILL_AT))
        killed_at = run.seconds()
        agents[2].send_signal(signal.SIGKILL)
        return finish(run, killed_at)


def main() -> int:
    """Run all, print a table; 1 if a number differs or something is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="names of programs; all where none is given")
    options = parser.parse_args()
    programs = options.programs or sorted(path.stem for path in EXAMPLES.glob("*.py"))
    print(
        "| program | runs | worker killed | preloaded, worker killed | agent of three killed |\n|---|---|---|---|---|"
    )
    wrong = 0
    for program in programs:
        alone, three = undisturbed(program), three_agents(program, kill=False)
        cells = [cell(alone, alone)]
        cells += [cell(worker_killed(program), alone), cell(preloaded(program), alone)]
        cells.append(cell(three_agents(program, kill=True), three))
        wrong += sum("**" in each for each in cells)
        print(f"| {program} | {' | '.join(cells)} |", flush=True)
    return 1 if wrong else 0


def cell(outcome: Outcome, expected: Outcome) -> str:
    """One field of the table; bold where something is wrong."""
    if outcome.loss is None or expected.loss is None:
        (Path(tempfile.gettempdir()) / "frameworks-failed.log").write_bytes(outcome.output)
        return "**failed**"
    differs = abs(outcome.loss - expected.loss)
    said = "same number" if differs <= TOLERANCE * max(1.0, abs(expected.loss)) else f"**differs by {differs:g}**"
    if outcome.recovery is not None:
        said += f", next step after {outcome.recovery:.2f} s"
    if outcome.not_preloaded:
        said += f", not preloaded: {outcome.not_preloaded}"
    if outcome.left:
        said += f", **left: {'; '.join(outcome.left)}**"
    return f"{said} ({outcome.seconds:.1f} s)"


if __name__ == "__main__":
    sys.exit(main())
