"""The examples end without a thread of gloo, with which the interpreter's end sometimes aborts the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.programs import PROGRAMS, ROOT, VARIABLES, why_not

LAST = Path(__file__).with_name("threads_at_exit.py")
OWN = ("train_ddp.py", "train_ddp_inprocess.py")
FRAMEWORKS = ("accelerate", "ignite", "lightning", "nanogpt", "pytorch_ddp")
"""Those whose framework lets go of the process group; the pages of the others say that theirs does not."""
DEADLINE = 120.0


def told(script: Path, python: str, folder: Path) -> str:
    """Standard output of two workers that train for a few steps, and tell what threads they end with."""
    rallyrun = str(Path(sys.executable).with_name("rallyrun"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "RALLYPOINT_"))}
    options = ("--steps=4", "--every=2", f"--checkpoint-dir={folder / 'saved'}")
    ended = subprocess.run(
        [rallyrun, "--standalone", "--nproc-per-node=2", str(LAST), str(script), *options],
        env={**kept, **VARIABLES, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, "TMPDIR": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def without_threads(out: str) -> None:
    """Both workers have trained, and neither has a thread of gloo left."""
    lines = out.splitlines()
    assert any(line.startswith("final loss ") for line in lines), out
    found = sorted(line for line in lines if "threads of gloo" in line)
    assert found == [f"rank {rank}, threads of gloo: none" for rank in (0, 1)]


@pytest.mark.parametrize("name", OWN)
def test_an_example_ends_without_threads_of_gloo(name: str, tmp_path: Path) -> None:
    without_threads(told(ROOT / "examples" / name, sys.executable, tmp_path))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_of_a_framework_ends_without_threads_of_gloo(name: str, tmp_path: Path) -> None:
    if (reason := why_not(name)) is not None:
        pytest.skip(reason)
    (program,) = (each for each in PROGRAMS if each.name == name)
    python = program.python()
    assert python is not None
    without_threads(told(program.script, python, tmp_path))
