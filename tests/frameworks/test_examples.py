"""The examples of frameworks: killed, stopped and resumed, they end with the loss of an undisturbed launch.

They and ours end without a thread of gloo, with which the interpreter's end sometimes aborts the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.environment import undisturbed
from tests.frameworks.programs import PROGRAMS, ROOT, VARIABLES, Program, why_not
from tests.frameworks.runs import EVERY, KILLED_AT, STEPS, STOPPED_AT, Outcome, Runs
from tests.processes import completed

LAST_SAVED = KILLED_AT // EVERY * EVERY
AT_EXIT = Path(__file__).with_name("threads_at_exit.py")
OWN = ("train_ddp.py", "train_ddp_inprocess.py")
FRAMEWORKS = ("accelerate", "ignite", "lightning", "nanogpt", "pytorch_ddp")
"""Those whose framework lets go of the process group; the pages of the others say that theirs does not."""
DEADLINE = 120.0


def ended_well(outcome: Outcome) -> float:
    """The loss of a launch that has ended with it, and of which nothing is left."""
    assert outcome.loss is not None, outcome.said
    assert outcome.codes[0] == outcome.codes[-1] == 0, outcome.said
    assert outcome.left == []
    return outcome.loss


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_loss_is_that_of_an_undisturbed_launch(program: Program, tmp_path: Path) -> None:
    if (reason := why_not(program.name)) is not None:
        pytest.skip(reason)
    runs = Runs(program, tmp_path)
    undisturbed = runs.undisturbed()
    expected = pytest.approx(ended_well(undisturbed), rel=1e-6)
    assert undisturbed.begun[0] == (2, 0)

    if program.saves_before_stop:
        killed, resumed = runs.killed_and_stopped()
        assert (killed.codes, killed.left) == ([143], []), killed.said
        assert "all workers of this node have saved" in killed.said
        ((workers, step), *_) = resumed.begun
        assert workers == 2
        # Who has saved may go on until the signal comes, and save again.
        assert STOPPED_AT <= step <= STEPS, killed.said
    else:
        killed = resumed = runs.worker_killed()
    assert killed.begun[:2] == [(2, 0), (2, LAST_SAVED)]
    assert ended_well(resumed) == expected

    if program.node_killed:
        killed = runs.node_killed()
        (_, (workers, step), *_) = killed.begun
        assert workers == 2
        assert LAST_SAVED <= step <= STEPS, killed.said  # the worker outlives its agent by a moment
        assert ended_well(killed) == expected


def test_every_folder_is_a_program_that_is_small_and_says_what_it_needs() -> None:
    folders = {each.parent.name: each for each in PROGRAMS[0].script.parents[1].glob("*/train.py")}
    assert sorted(folders) == [each.name for each in PROGRAMS]
    for name, script in folders.items():
        assert len(script.read_text().splitlines()) < 120, name
        assert "==" in script.with_name("requirements.txt").read_text(), name


def told(script: Path, python: str, folder: Path) -> str:
    """Standard output of two workers that train for a few steps, and tell what threads they end with."""
    rallyrun = str(Path(sys.executable).with_name("rallyrun"))
    options = ("--steps=4", "--every=2", f"--checkpoint-dir={folder / 'saved'}")
    ended = completed(
        [rallyrun, "--standalone", "--nproc-per-node=2", str(AT_EXIT), str(script), *options],
        env={**undisturbed(), **VARIABLES, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, "TMPDIR": str(folder)},
        cwd=folder,
        timeout=DEADLINE,
        check=True,
    )
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
