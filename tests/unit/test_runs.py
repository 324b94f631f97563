"""Which tests are left to `make test-all`, and what is run again."""

from __future__ import annotations

from pathlib import Path

from tests import again, outcomes, runs
from tests.outcomes import Ended

_PROCESS = frozenset({"process"})


def test_each_name_is_that_of_a_test() -> None:
    """A test that is renamed would otherwise change its run unseen."""
    root = Path(__file__).parents[2]
    for name in (*runs.LEFT_TO_ALL, *runs.KEPT):
        path, _, test = name.partition("::")
        assert (root / path).exists(), name
        assert not test or f"def {test.partition('[')[0]}(" in (root / path).read_text(), name


def test_the_longest_name_decides() -> None:
    assert runs.is_long("tests/faults/test_kills.py::test_of_a_control_plane_of_its_own_for_good")
    assert not runs.is_long("tests/faults/test_kills.py::test_of_the_agent_that_hosts_the_control_plane")
    assert not runs.is_long("tests/faults_of_another_name/test_kills.py::test_any")
    assert not runs.is_long("tests/unit/ranks/test_assign.py::test_any")


def test_a_file_of_outcomes_is_read_as_it_was_written(tmp_path: Path) -> None:
    ended = [Ended(2.5, "failed", _PROCESS, "a.py::b[x y]"), Ended(0.0, "skipped", frozenset(), "c", "no Slurm here")]
    path = tmp_path / "tests.txt"
    path.write_text("".join(each.line() for each in ended))
    assert outcomes.read(path) == ended
    assert outcomes.read(tmp_path / "none") == []


def test_only_a_few_tests_with_processes_are_run_again() -> None:
    failed = [Ended(1.0, "failed", _PROCESS, f"test_{number}") for number in range(6)]
    passed = Ended(1.0, "passed", frozenset(), "test_passed")
    assert again.deserving([*failed[:5], passed]) == [f"test_{number}" for number in range(5)]
    assert again.deserving(failed) == []
    assert again.deserving([passed]) == []
    assert again.deserving([failed[0], passed._replace(outcome="failed")]) == []
