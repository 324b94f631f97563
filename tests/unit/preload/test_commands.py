"""Which commands can be forked, and which variables prevent it for a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rallypoint.features.preload.forkable import (
    NotForkable,
    PreloadCommand,
    affinity_conflict,
    first_difference,
    parse_command,
    untracked_read,
)

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "t.py").touch()
    (tmp_path / "package").mkdir()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py", "a"], PreloadCommand((PYTHON,), False, "train.py", 2)),
        (["-u", "train.py", "-m", "x"], PreloadCommand((PYTHON, "-u"), False, "train.py", 3)),
        (["-uB", "-W", "e", "-Xdev", "t.py"], PreloadCommand((PYTHON, "-uB", "-W", "e", "-Xdev"), False, "t.py", 6)),
        (["-u", "-m", "pkg.train", "-x"], PreloadCommand((PYTHON, "-u"), True, "pkg.train", 4)),
        (["-um", "pkg.train"], PreloadCommand((PYTHON, "-u"), True, "pkg.train", 3)),
        (["-mpkg.train"], PreloadCommand((PYTHON,), True, "pkg.train", 2)),
        (["package"], PreloadCommand((PYTHON,), False, "package", 2)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands(words: list[str], command: PreloadCommand) -> None:
    assert parse_command([PYTHON, *words]) == command


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-c", "pass"], "-c runs a command"),
        (["-uc", "pass"], "-c runs a command"),
        (["-I", "train.py"], "PYTHONPATH"),
        (["-uE", "train.py"], "PYTHONPATH"),
        (["-S", "train.py"], "`site`"),
        (["-i", "train.py"], "-i is an interpreter flag"),
        (["--version"], "--version is an interpreter flag"),
        (["-u"], "no script"),
        (["-"], "no script"),
        ([], "no script"),
        (["-m"], "no module"),
        (["missing.py"], "'missing.py'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_that_cannot_be_forked(words: list[str], why: str) -> None:
    with pytest.raises(NotForkable, match=why):
        parse_command([PYTHON, *words])


def test_interpreters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "other").symlink_to(PYTHON)
    (tmp_path / "pythonx").symlink_to("/bin/sh")
    for program in ("./python", "/bin/sh", "/no/such/python", "nothing-on-the-path"):
        with pytest.raises(NotForkable, match="not itself a Python interpreter"):
            parse_command([program, "train.py"])
    parse_command([str(tmp_path / "other"), "train.py"])
    monkeypatch.setenv("PATH", os.path.dirname(PYTHON))
    parse_command([os.path.basename(PYTHON), "train.py"])


def test_path_of_the_script(tmp_path: Path) -> None:
    here = os.getcwd()
    (tmp_path / "linked.py").symlink_to(tmp_path / "package" / "real.py")
    (tmp_path / "package" / "real.py").touch()
    assert parse_command([PYTHON, "train.py"]).path0 == here
    assert parse_command([PYTHON, "train.py"]).main_file == os.path.join(here, "train.py")
    assert parse_command([PYTHON, "linked.py"]).path0 == os.path.join(here, "package")
    assert parse_command([PYTHON, "package"]).path0 == "package"
    assert parse_command([PYTHON, "package"]).main_file is None
    assert parse_command([PYTHON, "-m", "any"]).path0 == here


SEEN = {"A": "1", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("worker", "read", "says"),
    [
        (SEEN, "", None),
        ({**SEEN, "RANK": "3"}, "", None),
        ({**SEEN, "RANK": "3"}, "A", None),
        ({**SEEN, "RANK": "3"}, "RANK", "a.py:3 reads RANK, which is '3' in the worker and was not set during the"),
        ({**SEEN, "A": "2"}, "", None),
        ({"OMP_NUM_THREADS": "2"}, "A", "a.py:3 reads A, which is not set in the worker and was '1' during"),
        ({**SEEN, "OMP_NUM_THREADS": "1"}, "", "OpenMP reads OMP_NUM_THREADS, which is '1' in the worker and was '2'"),
        ({**SEEN, "TORCHELASTIC_ERROR_FILE": "x"}, "", None),
        ({**SEEN, "TORCH_LOGS": "x"}, "", "torch reads TORCH_LOGS"),
    ],
)
def test_first_difference(worker: dict[str, str], read: str, says: str | None) -> None:
    found = first_difference(SEEN, worker, dict.fromkeys(read.split(), "a.py:3"))
    assert found is says if says is None else found is not None and found.text.startswith(says)


def test_untracked_read() -> None:
    launcher = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "GROUP_RANK"]
    launcher += [f"TORCHELASTIC_{name}" for name in ("RUN_ID", "RESTART_COUNT", "ERROR_FILE", "TIMER_FILE")]
    assert untracked_read([*launcher, "RALLYPOINT_NOTICES"]) is None
    assert untracked_read(["JAX_PROCESS_ID", "TF_CONFIG"]) is None, "no import reads them"
    assert untracked_read(["JAX_PLATFORMS"]) == "JAX reads JAX_PLATFORMS"
    assert untracked_read(["RANK", "CUDA_VISIBLE_DEVICES"]) == "CUDA reads CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "OMP_NUM_THREADS is not set"),
        ({"OMP_NUM_THREADS": ""}, "OMP_NUM_THREADS is not set"),
        ({"OMP_NUM_THREADS": "4"}, None),
        ({"OMP_NUM_THREADS": "4", "OMP_PROC_BIND": "close"}, "OMP_PROC_BIND"),
        ({"OMP_NUM_THREADS": "4", "GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY"),
    ],
)
def test_affinity_conflict(environ: dict[str, str], says: str | None) -> None:
    assert affinity_conflict({0, 1}, (), environ) is None, "it may use all processors"
    assert affinity_conflict({0, 1}, [1, 0], environ) is None
    found = affinity_conflict({0, 1}, [1], environ)
    assert found is says if says is None else found is not None and says in found
