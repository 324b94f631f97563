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
from pathlib import Path

import pytest

from rallypoint.base.endpoint import free_port
from rallypoint.notices import VARIABLE as NOTICES
from tests.jobs.launching import RALLYRUN, Job, Launcher

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
    "FOUND": "where the test itself collects what it finds",
    "MASTER_PORT": "the kernel picks it",
    "MASTER_ADDR": "the source address towards the endpoint, not getfqdn() (contract section 10, row 8)",
    "TORCHELASTIC_ERROR_FILE": "lies in a folder with a random name",
    "TORCHELASTIC_RUN_ID": "made up where none is given",
}
"""The variables that may differ, and why. No others may, and no name may be missing."""

ADDED = {
    NOTICES: "the folder where workers find notices (`rallypoint.notices`)",
    "PYTHONFAULTHANDLER": "so that the stacks of all threads are in the log when a stop takes too long",
}
"""The variables that only we set, and why."""

FREE_PLACE = {"MASTER_PORT", "MASTER_ADDR"}
ALWAYS = {"FOUND", "TORCHELASTIC_ERROR_FILE"}


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
    "one worker": Case(("--standalone",), may_differ=frozenset(FREE_PLACE | {"TORCHELASTIC_RUN_ID"})),
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


def run_case(launcher: Launcher, which: str, case: Case, script: str) -> tuple[list[Job], str]:
    """Start all nodes of a case; returns them and the port of the endpoint."""
    found = launcher.folder / which
    found.mkdir()
    port = str(free_port())
    jobs = []
    for number, node in enumerate(case.nodes):
        flags = [flag.format(port=port) for flag in (*case.flags, *node)]
        env = {"NODE": str(number), "FOUND": str(found), **dict(case.env)}
        jobs.append(start(launcher, which, [*flags, script, "${local_rank}"], env, case.threads))
    return jobs, port


def environments(folder: Path, port: str) -> dict[str, dict[str, str]]:
    """What each worker found; the endpoint's port, which is another for each launcher, by a common name."""
    shown = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    for env in shown.values():
        env["MASTER_PORT"] = env["MASTER_PORT"].replace(port, "<the endpoint's>")
    return shown


@pytest.mark.parametrize("name", CASES)
def test_workers_find_the_same_variables(launcher: Launcher, name: str) -> None:
    case = CASES[name]
    script = launcher.script(NUMBERED)
    running = {which: run_case(launcher, which, case, script) for which in COMMANDS}
    found = {}
    for which, (jobs, port) in running.items():
        for job in jobs:
            assert job.ends() == 0, job.err
        found[which] = environments(launcher.folder / which, port)
    theirs, ours = found["torchrun"], found["rallyrun"]
    assert theirs.keys() == ours.keys()
    assert theirs
    may_differ = ALWAYS | case.may_differ
    assert may_differ <= DIFFERENT.keys()
    for worker, expected in theirs.items():
        assert expected.keys() == ours[worker].keys() - ADDED.keys()
        assert ours[worker].keys() >= ADDED.keys()
        differing = {key for key, value in expected.items() if ours[worker][key] != value}
        assert differing <= may_differ, {key: (expected[key], ours[worker][key]) for key in differing - may_differ}
        shapes = [_shape(each["TORCHELASTIC_ERROR_FILE"]) for each in (expected, ours[worker])]
        assert shapes[0] == shapes[1]


def _shape(path: str) -> str:
    """The path without what is random in it, the launcher's name, and that of this machine, which only ours has."""
    named = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", path)
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
def test_exit_codes_and_log_folders(launcher: Launcher, name: str) -> None:
    text, flags = ENDS[name]
    script = launcher.script(text) if name != "no such program" else "no-such-program"
    jobs = {which: start(launcher, which, [*flags, script]) for which in COMMANDS}
    codes = {which: job.ends() for which, job in jobs.items()}
    assert codes["torchrun"] == codes["rallyrun"], (codes, jobs["rallyrun"].err)
    trees = {which: tree(launcher.folder / f"logs-{which}") for which in COMMANDS}
    assert trees["torchrun"] == trees["rallyrun"]


def tree(folder: Path) -> dict[str, str]:
    """Paths under a log folder, without what is random in them, to what is in them; but for our links by rank."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        name = re.sub(r"^[^/]+", "JOB", str(path.relative_to(folder)))
        found[name] = path.read_text() if path.is_file() else ""
    return found


def test_a_signal_ends_both_alike(launcher: Launcher) -> None:
    script = launcher.script("import time\nprint('up', flush=True)\ntime.sleep(600)")
    jobs = {which: start(launcher, which, [script]) for which in COMMANDS}
    for job in jobs.values():
        job.until(lambda lines: lines == ["up"], "the worker is up")
        os.kill(job.pid, signal.SIGTERM)
    assert {which: job.ends() for which, job in jobs.items()} == {"torchrun": 1, "rallyrun": 1}
