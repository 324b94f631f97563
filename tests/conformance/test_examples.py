"""The examples under both launchers: their output, and that training does not depend on the launcher."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import without_compiler
from tests.processes import completed

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def _temporary_files_in_one_place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun leaves a folder behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))


def _launch(launcher: str, workers: int, example: str, *arguments: str) -> str:
    """Standard output of a job of one node that ends well."""
    done = completed(
        [str(BIN / launcher), "--standalone", f"--nproc-per-node={workers}", str(EXAMPLES / example), *arguments],
        env=os.environ | without_compiler.ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    return done.stdout


def _final_loss(text: str) -> float:
    (found,) = re.findall(r"^final loss (\d+\.\d{9})$", text, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize("launcher", ["torchrun", "rallyrun"])
def test_allreduce(launcher: str) -> None:
    lines = _launch(launcher, 2, "allreduce.py").splitlines()
    assert sorted(lines) == [f"rank {rank} of 2: sum 3" for rank in range(2)]


def test_training_depends_neither_on_the_number_of_workers_nor_on_a_break(tmp_path: Path) -> None:
    whole = _launch("rallyrun", 1, "train_ddp.py", "--steps=12", "--batch=4")
    folder = f"--checkpoint-dir={tmp_path}"
    first = _launch("rallyrun", 2, "train_ddp.py", "--steps=6", "--batch=4", "--every=3", folder)
    assert "2 workers, from step 0" in first
    rest = _launch("torchrun", 1, "train_ddp.py", "--steps=12", "--batch=4", "--every=3", folder)
    assert "1 workers, from step 6" in rest
    assert _final_loss(rest) == pytest.approx(_final_loss(whole), abs=1e-8)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_the_demo_trains_a_program_of_torch() -> None:
    done = completed(
        [
            *(str(BIN / "rallyctl"), "demo", "--steps=40"),
            f"--program={EXAMPLES / 'train_ddp.py'}",
            f"--standby-program={EXAMPLES / 'train_ddp_inprocess.py'}",
        ],
        env=os.environ | without_compiler.ENVIRONMENT,
        timeout=240,
        check=True,
    )
    assert "SIGKILL to rank 1" in done.stdout
    assert len(re.findall(r"resumed from step [1-9]", done.stdout)) == 2
    assert re.search(r"SIGKILL to all \d+ processes of one node", done.stdout)
    assert re.search(r"standby worker is ready\n.* all are training from step [1-9]\d* on", done.stdout, re.DOTALL)
    assert len(re.findall(r"finished: exit code 0, final loss", done.stdout)) == 4
