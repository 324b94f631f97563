"""The same command under torchrun and under ours: what workers find in their environment, exit codes, log folders."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rallypoint.notices import VARIABLE as NOTICES
from tests.conformance.record import Record
from tests.jobs.launching import RALLYRUN, Job, Launcher
from tests.ports import free_port

pytestmark = pytest.mark.torch

COMMANDS = {"torchrun": [str(Path(sys.executable).parent / "torchrun")], "rallyrun": RALLYRUN}

SHOW = """
import json, os
e = os.environ
with open(f"{e['FOUND']}/{e['NODE']}-{e['TORCHELASTIC_RESTART_COUNT']}-{e['NUMBER']}", "w") as file:
    json.dump(dict(e), file)
"""
# A worker's own number comes by its argument: LOCAL_RANK is one of the things to compare.
NUMBERED = "import os, sys\nos.environ['NUMBER'] = sys.argv[1]\n" + SHOW

DIFFERENT = {
    "MASTER_ADDR": "the source address towards the endpoint, not getfqdn() (contract section 10, row 8)",
}
"""The variables that may differ, and why. No others may, and no name may be missing."""

ADDED = {
    NOTICES: "the folder where workers find notices (`rallypoint.notices`)",
    "PYTHONFAULTHANDLER": "so that the stacks of all threads are in the log when a stop takes too long",
}
"""The variables that only we set, and why."""

FREE_PLACE = {"MASTER_ADDR"}


@dataclass(frozen=True)
class Case:
    """One job: flags of all nodes, flags of each node, what is added to the environment, what may differ."""

    flags: tuple[str, ...] = ()
    nodes: tuple[tuple[str, ...], ...] = ((),)
    env: tuple[tuple[str, str], ...] = ()
    may_differ: frozenset[str] = frozenset(FREE_PLACE)
    threads: bool = False
    """Whether the test sets OMP_NUM_THREADS for the agents."""


ALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=job")
STATIC = Case(
    flags=("--nnodes=2", "--rdzv-id=job", "--master-addr=127.0.0.1", "--master-port={port}", "--max-restarts=2"),
    nodes=(("--node-rank=0", "--role=A"), ("--node-rank=1", "--role=B", "--nproc-per-node=2")),
    may_differ=frozenset(),
    threads=True,
)
C10D = Case(
    flags=("--nnodes=2", "--rdzv-id=job", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}"),
    nodes=(("--nproc-per-node=2",), ()),
)
CASES = {
    "one worker": Case(("--standalone",)),
    "two workers, a role and restarts": Case(
        (*ALONE, "--nproc-per-node=2", "--role=trainer", "--max-restarts=3"),
    ),
    "by variables": Case(
        env=(
            ("PET_NPROC_PER_NODE", "2"),
            ("PET_RDZV_BACKEND", "c10d"),
            ("PET_RDZV_ID", "pet"),
            ("PET_RDZV_ENDPOINT", "localhost:0"),
            ("PET_MAX_RESTARTS", "1"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
            ("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT"),
        ),
        threads=True,
    ),
    "static": STATIC,
    "c10d": C10D,
    "no shared store, no logs": Case(
        (*ALONE, "--log-dir=/dev/null"),
        env=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
    ),
}


def start(
    launcher: Launcher, which: str, flags: Sequence[str], env: dict[str, str] | None = None, threads: bool = True
) -> Job:
    """Start an agent under one of the two launchers, with a log folder that is named after it."""
    environment = launcher.environment(env)
    if not threads:
        del environment["OMP_NUM_THREADS"]
    logs = [] if any(flag.startswith("--log-dir") for flag in flags) else [f"--log-dir=logs-{which}"]
    job = Job([*COMMANDS[which], *logs, *flags], environment, launcher.folder)
    launcher.jobs.append(job)
    return job


def run_case(launcher: Launcher, which: str, case: Case, script: str) -> dict[str, dict[str, str]]:
    """Run all nodes of a case; returns what each worker finds that its launcher has not found."""
    found = launcher.folder / which
    found.mkdir()
    port = str(free_port())
    jobs = []
    for number, node in enumerate(case.nodes):
        flags = [flag.format(port=port) for flag in (*case.flags, *node)]
        env = {"NODE": str(number), "FOUND": str(found), **dict(case.env)}
        jobs.append(start(launcher, which, [*flags, script, "${local_rank}"], env, case.threads))
    for job in jobs:
        assert job.ends() == 0, job.err
    given = launcher.environment({"FOUND": str(found), **dict(case.env)})
    if not case.threads:
        del given["OMP_NUM_THREADS"]
    return environments(found, port, given)


def environments(folder: Path, port: str, given: dict[str, str]) -> dict[str, dict[str, str]]:
    """What each worker found beside what was given, and nothing else is to be missing; the endpoint's port, which is
    another for each launcher, by a common name.
    """
    shown = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    told = {}
    for worker, env in shown.items():
        env["MASTER_PORT"] = "<the endpoint's>" if env["MASTER_PORT"] == port else "<another>"
        env["TORCHELASTIC_RUN_ID"] = re.sub(UUID, "ID", env["TORCHELASTIC_RUN_ID"])
        env["TORCHELASTIC_ERROR_FILE"] = _shape(env["TORCHELASTIC_ERROR_FILE"])
        assert env.keys() >= given.keys()
        told[worker] = {name: value for name, value in sorted(env.items()) if given.get(name) != value}
    return told


@pytest.mark.parametrize("name", CASES)
def test_workers_find_the_same_variables(launcher: Launcher, record: Record, name: str) -> None:
    case = CASES[name]
    script = launcher.script(NUMBERED)
    ask = partial(run_case, launcher, "torchrun", case, script)
    question = [NUMBERED, case.flags, case.nodes, case.env, case.threads]
    theirs = record.answer("worker_environment", name, question, ask)
    ours = run_case(launcher, "rallyrun", case, script)
    assert theirs.keys() == ours.keys()
    assert theirs
    assert case.may_differ <= DIFFERENT.keys()
    for worker, expected in theirs.items():
        assert expected.keys() == ours[worker].keys() - ADDED.keys()
        assert ours[worker].keys() >= ADDED.keys()
        differing = {key for key, value in expected.items() if ours[worker][key] != value}
        unexplained = {key: (expected[key], ours[worker][key]) for key in differing - case.may_differ}
        assert not unexplained


UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def _shape(path: str) -> str:
    """The path without what is random in it, the launcher's name, and that of this machine, which only ours has."""
    named = re.sub(UUID, "ID", path)
    return re.sub(rf"^logs-\w+/(.+?)(_{re.escape(socket.gethostname())})?_\w{{8}}/", r"logs/\1_*/", named)


RESTART = """
import os, sys, time
print("out", flush=True)
print("err", file=sys.stderr)
mine, other = (f"{os.getppid()}-{rank}" for rank in (os.environ["RANK"], 1 - int(os.environ["RANK"])))
open(mine, "w").close()
while not os.path.exists(other):  # who fails first has the other stopped, perhaps before it has written
    time.sleep(0.01)
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""

ENDS = {
    "success": ("print('well')", []),
    "an exit code": ("import sys\nsys.exit(3)", []),
    "a signal": ("import os\nos.kill(os.getpid(), 9)", []),
    "a restart": (
        RESTART,
        ["--max-restarts=1", "--nproc-per-node=2", "-r=1", "-t=0:2"],
    ),
    "an unknown flag": ("", ["--no-such-flag"]),
    "an unknown backend": ("", ["--rdzv-backend=zookeeper", "--rdzv-endpoint=x:1", "--rdzv-id=x"]),
    "no such program": ("", ["--no-python"]),
}


@pytest.mark.parametrize("name", ENDS)
def test_exit_codes_and_log_folders(launcher: Launcher, record: Record, name: str) -> None:
    text, flags = ENDS[name]
    script = launcher.script(text) if name != "no such program" else "no-such-program"

    def left(which: str) -> list[object]:
        job = start(launcher, which, [*flags, script])
        return [job.ends(), tree(launcher.folder / f"logs-{which}")]

    theirs = record.answer("worker_environment", f"{name}, as an end", [text, flags], partial(left, "torchrun"))
    assert left("rallyrun") == theirs, launcher.jobs[-1].err


def tree(folder: Path) -> dict[str, str]:
    """Paths under a log folder, without what is random in them, to what is in them; but for our links by rank."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        name = re.sub(r"^[^/]+", "JOB", str(path.relative_to(folder)))
        found[name] = path.read_text() if path.is_file() else ""
    return found


STAYS = "import time\nprint('up', flush=True)\ntime.sleep(600)"


def test_a_signal_ends_both_alike(launcher: Launcher, record: Record) -> None:
    script = launcher.script(STAYS)

    def ends(which: str) -> int:
        job = start(launcher, which, [script])
        job.until(lambda lines: lines == ["up"], "the worker is up")
        os.kill(job.pid, signal.SIGTERM)
        return job.ends()

    def torchs() -> int:
        code = ends("torchrun")
        return 1 if code == -signal.SIGABRT else code  # it may crash at its end (contract section 5.6)

    assert ends("rallyrun") == 1 == record.answer("worker_environment", "SIGTERM, as an end", STAYS, torchs)
