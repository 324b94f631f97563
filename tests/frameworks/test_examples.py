"""The examples of frameworks: killed, stopped and resumed, they end with the loss of an undisturbed launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.programs import PROGRAMS, Program, why_not
from tests.frameworks.runs import EVERY, KILLED_AT, STEPS, STOPPED_AT, Outcome, Runs

LAST_SAVED = KILLED_AT // EVERY * EVERY


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
