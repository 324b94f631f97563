"""Other people's launchers, as they are and under `rallyctl shim run`: the same program, undisturbed and with a kill.

    python -m tests.frameworks.launchers [NAME ...]

Prints a table: whether the numbers equal those of the undisturbed launch, and the time from a worker's death to the
next step. Both ways run in turn. `test_launchers.py` checks the same for the installed launchers.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import F_SETPIPE_SZ, fcntl
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from tests.environment import undisturbed
from tests.frameworks.programs import ENVIRONMENT
from tests.ports import free_port

HERE = Path(__file__).parent
TRAINING, BY_FUNCTION = str(HERE / "training.py"), str(HERE / "by_function.py")
PYTHON = ENVIRONMENT / "bin" / "python"
SIZE, EVERY = 4096, 20
"""Bytes of a message of `training.py`, and the steps from one checkpoint to the next."""
KILLED_AT, DEADLINE = 25, 600.0
"""A step; seconds after which a launch is given up."""
_MARK = "RALLYPOINT_LAUNCHERS_RUN"
UNLOCKED = {
    "nemo-run": "it needs Ray, and a hundred packages of that",
    "torchrunx": "it has a launcher of its own",
    "torchx": "it needs urllib3 below 2",
}
"""Why a package is not in requirements/frameworks.txt. Whoever has installed it into that environment sees it tried."""


class Launcher(NamedTuple):
    """What people start instead of `torchrun`."""

    name: str
    package: str
    command: Callable[[str], list[str]]
    """The command that trains with this folder."""
    restarts: bool = True
    """Whether the workers are started again; otherwise the shim changes nothing."""

    def version(self) -> str | None:
        """The version of the package in the environment of frameworks; None where it is not installed."""
        paths = [*map(str, ENVIRONMENT.glob("lib/python*/site-packages")), *sys.path]  # torch is that of `.venv`
        return next((each.version for each in distributions(name=self.package, path=paths)), None)


def _shell(folder: str) -> list[str]:
    script = 'set -e\ncd "$1"\nexec torchrun --standalone --nproc-per-node=2 "$2" plain "$1"'
    return ["sh", "-c", script, "train.sh", folder, TRAINING]


# On processors alone, accelerate starts no launcher; the program tells it that there is no GPU.
_ACCELERATE: tuple[str, ...] = (
    "accelerate",
    "launch",
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
    "--mixed_precision=no",
)
_ACCELERATE += ("--dynamo_backend=no", "--main_process_port=0", "--max_restarts=3")
_FABRIC = ("fabric", "run", "--accelerator=cpu", "--devices=2", "--strategy=ddp")
_TORCHX = ("torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--env", "PET_MAX_RESTARTS=3", "--script")

LAUNCHERS = (
    Launcher("shell script", "torch", _shell),
    Launcher(
        "python -m",
        "torch",
        lambda at: [
            str(PYTHON),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            TRAINING,
            "plain",
            at,
        ],
    ),
    Launcher("accelerate launch", "accelerate", lambda at: [*_ACCELERATE, TRAINING, "accelerate", at]),
    Launcher("notebook_launcher", "accelerate", lambda at: [str(PYTHON), BY_FUNCTION, "notebook_launcher", at]),
    Launcher(
        "fabric run",
        "lightning",
        lambda at: [*_FABRIC, f"--main-port={free_port()}", TRAINING, "--", "fabric", at],
    ),
    Launcher("torchx dist.ddp", "torchx", lambda at: [*_TORCHX, TRAINING, "--", "plain", at]),
    Launcher("nemo-run torchrun", "nemo-run", lambda at: [str(PYTHON), BY_FUNCTION, "nemo_run", at]),
    Launcher("torchrunx", "torchrunx", lambda at: [str(PYTHON), BY_FUNCTION, "torchrunx", at], restarts=False),
)


class Outcome(NamedTuple):
    """How a launch has ended."""

    final: str
    """The last loss and the sum of the weights; empty if it did not come to that."""
    code: int
    restarted: float | None
    """Seconds from the kill to the first line of a new worker, before it imports torch."""
    recovery: float | None
    """Seconds from the kill to the next step."""
    begun: list[int]
    """The step at which rank 0 has begun, each time."""
    said: str
    """What the command has printed, and all log files."""

    @property
    def is_ours(self) -> bool:
        """Whether Rallypoint says that it has launched this."""
        return "runs instead of" in self.said


def run(launcher: Launcher, *, shim: bool, kill: bool) -> Outcome:
    """Launch the program; with `kill`, the worker of rank 1 is killed at a step that is known."""
    with tempfile.TemporaryDirectory(prefix="shim-") as folder, _launched(launcher, Path(folder), shim) as launch:
        if kill:
            reached = launch.read_until(lambda said: said == f"step {KILLED_AT}")
            assert reached, Path(folder, "output").read_text(errors="replace")
            os.kill(int(Path(folder, "rank-1").read_text()), signal.SIGKILL)
            killed = time.monotonic()
            again = launch.read_until(lambda said: said.startswith("begin")) and launch.read_until(
                lambda said: said.startswith("step")
            )
            recovery = time.monotonic() - killed if again else None
        launch.read_until(lambda said: False)
        code = launch.process.wait(DEADLINE)
        logs = [each for each in Path(folder).rglob("*") if each.suffix in ("", ".log") and each.is_file()]
        said = "\n".join(each.read_text(errors="replace") for each in logs)
        begun = [int(each.split()[1]) for each in launch.messages if each.startswith("begin")]
        final = next((each.removeprefix("final ") for each in launch.messages if each.startswith("final")), "")
        if not kill:
            return Outcome(final, code, None, None, begun, said)
        started = [float(each) for each in Path(folder, "started").read_text().split()]
        restarted = next((each - killed for each in sorted(started) if each > killed), None)
        return Outcome(final, code, restarted, recovery, begun, said)


class _Launch:
    def __init__(self, process: subprocess.Popen[bytes], pipe: int) -> None:
        self.process = process
        self.messages: list[str] = []
        self._pipe = pipe
        self._ended = os.pidfd_open(process.pid)
        self._until = time.monotonic() + DEADLINE

    def read_until(self, holds: Callable[[str], bool]) -> bool:
        """Read messages up to one of which something holds; False if the launch ends before."""
        while True:
            left = max(0.0, self._until - time.monotonic())
            ready, _, _ = select.select([self._pipe, self._ended], [], [], left)
            if not ready:
                raise TimeoutError(f"the launch did not end within {DEADLINE:.0f} s, after {self.messages[-1:]}")
            if self._pipe not in ready:
                return False
            if not (data := os.read(self._pipe, SIZE)):
                return False
            self.messages.append(data.decode().strip())
            if holds(self.messages[-1]):
                return True

    def close(self) -> None:
        os.close(self._pipe)
        os.close(self._ended)


@contextmanager
def _launched(launcher: Launcher, folder: Path, shim: bool) -> Iterator[_Launch]:
    """A launch, of which nothing stays."""
    os.mkfifo(folder / "steps")
    pipe = os.open(folder / "steps", os.O_RDWR | os.O_CLOEXEC)  # written ends may come and go
    fcntl(pipe, F_SETPIPE_SZ, SIZE)
    mark = uuid.uuid4().hex
    environ = undisturbed()
    environ |= {_MARK: mark, "OMP_NUM_THREADS": "1", "PET_MAX_RESTARTS": "3", "LOGLEVEL": "INFO", "TMPDIR": str(folder)}
    # `torchrun` is that of the environment that torch is in.
    path = [f"{ENVIRONMENT}/bin", str(Path(sys.executable).parent), os.environ["PATH"]]
    environ |= {"PATH": os.pathsep.join(path), "NEMORUN_HOME": str(folder / "nemo")}
    under = [str(PYTHON), "-m", "rallypoint.cli.rallyctl", "shim", "run", "--"] if shim else []
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*under, *launcher.command(str(folder))],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=environ,
            cwd=folder,
        )
    launch = _Launch(process, pipe)
    try:
        yield launch
    finally:
        launch.close()
        for pid in _processes(f"{_MARK}={mark}"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _processes(variable: str) -> Iterator[int]:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if variable.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                yield int(name)


def _after_a_kill(launcher: Launcher, shim: bool, expected: str) -> str:
    try:
        killed = run(launcher, shim=shim, kill=True)
    except TimeoutError:
        return "**hangs**" if shim else "hangs"
    if killed.restarted is None or killed.recovery is None:
        return "ends" if not launcher.restarts else f"**ends** {killed.said[-2000:]}"
    said = f"{killed.restarted:.2f} s, {killed.recovery:.2f} s"
    return said if killed.final == expected else f"{said} **{killed.final or killed.said[-2000:]}**"


def main() -> int:
    """Print the table; 1 if a number differs."""
    print("From a kill to the first line of a new worker, and to the next step:\n")
    print("| launcher | version | numbers | torch's | under the shim |\n|---|---|---|---|---|")
    wrong = 0
    for launcher in LAUNCHERS:
        if len(sys.argv) > 1 and launcher.name not in sys.argv[1:]:
            continue
        if (version := launcher.version()) is None:
            print(f"| {launcher.name} | not installed | | | |", flush=True)
            continue
        alone = run(launcher, shim=False, kill=False)
        ours = run(launcher, shim=True, kill=False)
        same = "same" if alone.final == ours.final != "" else f"**{alone.final} and {ours.final}**"
        times = [_after_a_kill(launcher, shim, alone.final) for shim in (False, True)]
        wrong += any("**" in each for each in (same, *times))
        print(f"| {launcher.name} | {version} | {same} | {times[0]} | {times[1]} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
