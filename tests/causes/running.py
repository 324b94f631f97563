"""Runs one case, and removes its leftovers.

The job's console is a file, as under Slurm, which a person reads from beginning to end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.causes.case import Act, Case, Source
from tests.causes.reading import Score, answer, of_nodes, score
from tests.jobs.launching import RALLYCTL, RALLYRUN, Launcher, readable
from tests.ports import free_port

PROGRAMS = Path(__file__).parent / "programs"
TOOLS = {"rallyrun": RALLYRUN, "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
if (_FT_LAUNCHER := shutil.which("ft_launcher")) is not None:  # of nvidia-resiliency-ext
    TOOLS["ft_launcher"] = [_FT_LAUNCHER, "--ignore-missing-fault-tol-cfg"]
READY = "READY"
_LOOK = 0.25
_ASK = 2.0
"""Seconds between looks at a job that runs, and at its status."""
_ALL_GONE = 15.0
"""Seconds after which nothing may be left of a job whose agents have ended."""


class Outcome(NamedTuple):
    """How a case went: what the launchers said, and what was left of the job that should not be there."""

    score: Score
    said: list[str]
    left: list[str]
    consoles: list[str]


def missing(case: Case) -> str:
    """Why a case cannot run here; empty if it can."""
    modules = [name for name in imports(case) if find_spec(name) is None]
    if modules:
        return f"{', '.join(modules)} cannot be imported"
    return next((f"needs {name}" for name in case.needs if not _MACHINE[name]()), "")


def imports(case: Case) -> set[str]:
    """The packages of others that the program of a case imports."""
    path = PROGRAMS / f"{case.program}.py"
    return set(_FOREIGN.findall(path.read_text())) if path.exists() else set()


_FOREIGN = re.compile(r"^(?:import|from) (torch|accelerate|lightning|transformers|deepspeed|rich)\b", re.MULTILINE)


def _can_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0


def _can_limit_memory() -> bool:
    return os.access("/sys/fs/cgroup/memory/memory.limit_in_bytes", os.W_OK)


_MACHINE = {"a mount namespace": _can_mount, "a control group of version 1": _can_limit_memory}


class _Agent:
    """One launcher, which writes to a file."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: Path, console: Path) -> None:
        self._console = console
        with console.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, cwd=cwd, start_new_session=True
            )
        self._ended = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def console(self) -> str:
        return self._console.read_text(errors="replace")

    def act(self, act: Act) -> None:
        (os.killpg if act.group else os.kill)(self.pid, act.signal)

    def ends(self, seconds: float) -> bool:
        """Whether it has ended, or does so within some seconds."""
        return readable(self._ended, max(seconds, 0.0))

    def close(self) -> None:
        """Kill it if it runs: what it has started is its reaper's to end."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._ended)


def run(case: Case, tool: str) -> Outcome:
    """Run a case until it has ended, until its answer is right, or until its time is up."""
    with tempfile.TemporaryDirectory(prefix="causes-") as name:
        launcher = Launcher(Path(name))
        with _agents(case, tool, launcher) as agents:
            said = _follow(case, tool, launcher, agents)
            consoles = [agent.console() for agent in agents]
        left = [*_left(launcher), *_defects(consoles)] if tool == "rallyrun" else []
        for pid in launcher.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _gone(launcher)
        with suppress(FileNotFoundError):
            _group(launcher).rmdir()
    return Outcome(of_nodes([score(case, text) for text in said]), said, left, consoles)


@contextmanager
def _agents(case: Case, tool: str, launcher: Launcher) -> Iterator[list[_Agent]]:
    agents: list[_Agent] = []
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    try:
        for node in range(case.nodes):
            own = [*case.flags, *(case.own_flags if tool == "rallyrun" else ()), f"--nproc-per-node={case.workers}"]
            nodes = (
                ["--standalone"] if case.nodes == 1 else [f"--nnodes={case.nodes}", "--local-addr=127.0.0.1", *meeting]
            )
            launch = [*TOOLS[tool], *nodes, *own, *_script(case), *case.arguments]
            shell = ["sh", "-c", case.shell, "sh"] if case.shell else []
            env = launcher.environment({"GROUP": str(_group(launcher))})
            agents.append(_Agent([*shell, *launch], env, launcher.folder, launcher.folder / f"console-{node}"))
        yield agents
    finally:
        for agent in agents:
            agent.close()


def _group(launcher: Launcher) -> Path:
    """The control group of a case that makes one."""
    return Path(f"/sys/fs/cgroup/memory/causes-{launcher.mark}")


def _script(case: Case) -> list[str]:
    path = PROGRAMS / f"{case.program}.py"
    return [str(path)] if path.exists() else [case.program]


def _follow(case: Case, tool: str, launcher: Launcher, agents: list[_Agent]) -> list[str]:
    """What the launcher of each node says in the end."""
    deadline = time.monotonic() + case.seconds
    act, said = case.act, [""] * len(agents)
    while time.monotonic() < deadline:
        running = [agent for agent in agents if not agent.ends(0.0)]
        said = _said(case, tool, launcher, agents, asking=bool(running))
        if not running or of_nodes([score(case, text) for text in said]) is Score.RIGHT:
            break
        ready = sum(agent.console().count(READY) for agent in agents)
        if act is not None and ready == case.workers * case.nodes:
            agents[act.node].act(act)
            act = None
        look = _ASK if case.source is Source.STATUS else _LOOK
        running[0].ends(min(look, deadline - time.monotonic()))
    return said


def _said(case: Case, tool: str, launcher: Launcher, agents: list[_Agent], asking: bool) -> list[str]:
    match case.source:
        case Source.CONSOLE:
            return [answer(agent.console(), agent.pid) for agent in agents]
        case Source.STATUS:
            return [_status(launcher) if tool == "rallyrun" and asking else ""]
        case Source.INCIDENT:
            files = sorted(path for path in launcher.folder.glob("incidents/**/*") if "stacks" in str(path))
            return ["\n".join(path.read_text(errors="replace") for path in files if path.is_file())]


def _status(launcher: Launcher) -> str:
    command = [*RALLYCTL, "status"]
    done = subprocess.run(
        command,
        env=launcher.environment(),
        cwd=launcher.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def _left(launcher: Launcher) -> list[str]:
    """Processes and temporary files that are still there when the time for their end has passed."""
    _gone(launcher)
    kept = re.compile(
        r"torchelastic_|tmp\w*$|pymp-|pytorch-errorfile|torchinductor"
    )  # folders of logs, and what is the programs' own
    return [*launcher.left(), *(name for name in launcher.left_files() if not kept.search(name))]


def _defects(consoles: list[str]) -> list[str]:
    """What the launcher calls a defect of its own: no report of a failure is one."""
    return [line for console in consoles for line in console.split("\n") if "a bug in Rallypoint" in line]


def _gone(launcher: Launcher) -> None:
    deadline = time.monotonic() + _ALL_GONE
    for pid in launcher.pids():
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                readable(fd, max(deadline - time.monotonic(), 0.0))
            finally:
                os.close(fd)
