"""Programs written for torch, run with torch and, with only their import lines changed, with Rallypoint.

Once their stores stay torch's, and once no torch is needed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.record import From, Record
from tests.jobs.launching import RALLYRUN, Launcher

pytestmark = pytest.mark.torch

PROGRAMS = Path(__file__).parent / "written_for_torch"
TORCHRUN = [str(Path(sys.executable).parent / "torchrun")]


class Change(NamedTuple):
    """What is replaced in the text of a program."""

    old: str
    new: str
    without_torch: bool = False
    """Whether torch cannot be imported then."""


TORCHS_STORES = Change("torch.distributed.elastic", "rallypoint.compat.elastic")
NO_TORCH = Change("torch.distributed", "rallypoint.compat", without_torch=True)
CHANGES = [pytest.param(TORCHS_STORES, id="torch's stores"), pytest.param(NO_TORCH, id="no torch")]
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
    if change.without_torch:
        (folder / "torch.py").write_text(_REFUSE_TORCH)
    temporary = folder / "tmp"  # torch's workers leave files there
    temporary.mkdir(exist_ok=True)
    env = {"TMPDIR": str(temporary)} if change is AS_IT_IS else None
    job = launcher.command([sys.executable, str(copy), *arguments], env)
    assert job.ends() == 0, job.err
    return json.loads(job.out[-1])


def torch_says(launcher: Launcher, record: Record, name: str, *arguments: str, since: str = "") -> object:
    """What the program says with torch, live or recorded."""
    question = [(PROGRAMS / f"{name}.py").read_text(), *arguments]
    return record.answer(
        "compat_programs",
        " ".join([name, *arguments]),
        question,
        lambda: says(launcher, name, AS_IT_IS, *arguments),
        From.PYTHON,
        since,
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("max_restarts", ["0", "1"])
def test_an_agent_over_a_rendezvous_of_its_own(
    launcher: Launcher, record: Record, change: Change, max_restarts: str
) -> None:
    theirs = torch_says(launcher, record, "agent", max_restarts)
    assert says(launcher, "agent", change, max_restarts) == theirs


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("program", ["asking", "backend", "telemetry"])
def test_a_program(launcher: Launcher, record: Record, change: Change, program: str) -> None:
    assert says(launcher, program, change) == torch_says(launcher, record, program)


@pytest.mark.parametrize("program", ["functions", "forks", "stores"])
def test_a_program_that_holds_no_store(launcher: Launcher, record: Record, program: str) -> None:
    assert says(launcher, program, NO_TORCH) == torch_says(launcher, record, program)


def test_what_is_newer_than_the_installed_torch(launcher: Launcher, record: Record) -> None:
    assert says(launcher, "newer", NO_TORCH) == torch_says(launcher, record, "newer", since="2.15")


@pytest.mark.parametrize("kind", ["program", "function"])
def test_a_program_whose_workers_are_its_own_gets_a_signal(launcher: Launcher, record: Record, kind: str) -> None:
    assert says(launcher, "signals", NO_TORCH, kind) == torch_says(launcher, record, "signals", kind)


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
def test_a_rendezvous_plug_in(launcher: Launcher, record: Record, change: Change) -> None:
    script = launcher.script(VISITED)
    flags = [
        "--rdzv-backend=visiting",
        "--rdzv-endpoint=localhost:0",
        "--rdzv-id=j",
        "--rdzv-conf=mark=m,number=7",
        "--nproc-per-node=2",
        f"--log-dir={launcher.folder / 'logs'}",
    ]

    def said(command: list[str], each: Change) -> list[str]:
        env = site(launcher, "torchrun.handlers", "visiting = visiting:offer", each)
        job = launcher.command([*command, *flags, script], env)
        assert job.ends() == 0, job.err
        return sorted(job.out)

    question = [VISITED, (PROGRAMS / "visiting.py").read_text(), *flags[:-1]]
    theirs = record.answer("compat_programs", "visiting", question, lambda: said(TORCHRUN, AS_IT_IS))
    assert said(RALLYRUN, change) == theirs == ["m7 1 1 j 0 2", "m7 1 1 j 1 2"]


def test_log_specs(launcher: Launcher, record: Record) -> None:
    text = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    script = launcher.script(text)
    flags = ["--standalone", "--nproc-per-node=2", "--logs-specs=flat"]

    def found(command: list[str], each: Change) -> dict[str, str]:
        env = site(launcher, "torchrun.logs_specs", "flat = flat_specs:Flat", each)
        logs = launcher.folder / f"logs-{each.new}"
        job = launcher.command([*command, *flags, f"--log-dir={logs}", script], env)
        assert job.ends() == 0, job.err
        return {path.name: path.read_text() for path in sorted(logs.iterdir())}

    question = [text, (PROGRAMS / "flat_specs.py").read_text(), *flags]
    theirs = record.answer("compat_programs", "flat_specs", question, lambda: found(TORCHRUN, AS_IT_IS))
    assert found(RALLYRUN, TORCHS_STORES) == theirs
    assert theirs["out1"] == "out 1\n"
