"""Programs written for torch, run with torch and, with only their import lines changed, with Rallypoint.

Once their stores stay torch's, and once torch is not needed at all.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.jobs.launching import RALLYRUN, Launcher

pytestmark = pytest.mark.torch

PROGRAMS = Path(__file__).parent / "written_for_torch"
TORCHRUN = [str(Path(sys.executable).parent / "torchrun")]


class Change(NamedTuple):
    """What is replaced in the text of a program."""

    old: str
    new: str


CHANGES = [
    pytest.param(Change("torch.distributed.elastic", "rallypoint.compat.elastic"), id="torch's stores"),
    pytest.param(Change("torch.distributed", "rallypoint.compat"), id="no torch"),
]
AS_IT_IS = Change("torch.distributed", "torch.distributed")

VISITED = """
import os
os.write(1, " ".join(os.environ[name] for name in ("VISITED", "RANK", "WORLD_SIZE")).encode() + b"\\n")
"""

_REFUSE_TORCH = "raise ImportError('torch is not to be had here')\n"


def changed(name: str, change: Change, folder: Path) -> Path:
    """A copy of a program with its import lines changed; every line that differs is an import."""
    text = (PROGRAMS / f"{name}.py").read_text()
    lines = [line.replace(change.old, change.new) if "import" in line else line for line in text.splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"{name}.py"
    copy.write_text("\n".join(lines) + "\n")
    return copy


def says(launcher: Launcher, name: str, change: Change, *arguments: str) -> object:
    """The last line of a program's standard output, as JSON."""
    folder = launcher.folder / change.new
    copy = changed(name, change, folder)
    if change.old == "torch.distributed" and change is not AS_IT_IS:
        (folder / "torch.py").write_text(_REFUSE_TORCH)
    temporary = folder / "tmp"  # torch's workers leave files there
    temporary.mkdir(exist_ok=True)
    env = {"TMPDIR": str(temporary)} if change is AS_IT_IS else None
    job = launcher.command([sys.executable, str(copy), *arguments], env)
    assert job.ends() == 0, job.err
    return json.loads(job.out[-1])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("max_restarts", ["0", "1"])
def test_an_agent_over_a_rendezvous_of_its_own(launcher: Launcher, change: Change, max_restarts: str) -> None:
    theirs = says(launcher, "agent", AS_IT_IS, max_restarts)
    assert says(launcher, "agent", change, max_restarts) == theirs


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("program", ["backend", "telemetry"])
def test_a_program(launcher: Launcher, change: Change, program: str) -> None:
    assert says(launcher, program, change) == says(launcher, program, AS_IT_IS)


@pytest.mark.parametrize("program", ["launching", "output", "functions"])
def test_a_program_that_holds_no_store(launcher: Launcher, program: str) -> None:
    change = Change("torch.distributed", "rallypoint.compat")
    assert says(launcher, program, change) == says(launcher, program, AS_IT_IS)


def site(launcher: Launcher, group: str, entry: str, change: Change) -> dict[str, str]:
    """An installed package that offers `entry` in an entry-point group; returns the environment in which it is."""
    module = entry.partition(" = ")[2].partition(":")[0]
    folder = launcher.folder / f"site-{change.new}"
    changed(module, change, folder)
    metadata = folder / "offering-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


@pytest.mark.parametrize("change", CHANGES)
def test_a_rendezvous_plug_in(launcher: Launcher, change: Change) -> None:
    script = launcher.script(VISITED)
    flags = [
        "--rdzv-backend=visiting",
        "--rdzv-endpoint=localhost:0",
        "--rdzv-id=j",
        "--rdzv-conf=mark=m,number=7",
        "--nproc-per-node=2",
        f"--log-dir={launcher.folder / 'logs'}",
    ]
    said = []
    for command, each in ((TORCHRUN, AS_IT_IS), (RALLYRUN, change)):
        env = site(launcher, "torchrun.handlers", "visiting = visiting:offer", each)
        job = launcher.command([*command, *flags, script], env)
        assert job.ends() == 0, job.err
        said.append(sorted(job.out))
    assert said[0] == said[1] == ["m7 1 1 j 0 2", "m7 1 1 j 1 2"]


def test_log_specs(launcher: Launcher) -> None:
    script = launcher.script("import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    change = Change("torch.distributed.elastic", "rallypoint.compat.elastic")
    found = []
    for command, each in ((TORCHRUN, AS_IT_IS), (RALLYRUN, change)):
        env = site(launcher, "torchrun.logs_specs", "flat = flat_specs:Flat", each)
        logs = launcher.folder / f"logs-{each.new}"
        flags = ["--standalone", "--nproc-per-node=2", "--logs-specs=flat", f"--log-dir={logs}"]
        job = launcher.command([*command, *flags, script], env)
        assert job.ends() == 0, job.err
        found.append({path.name: path.read_text() for path in sorted(logs.iterdir())})
    assert found[0] == found[1]
    assert found[0]["out1"] == "out 1\n"
