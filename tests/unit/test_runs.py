"""Which tests are left to `make test-all`, and what is run again."""

from __future__ import annotations

from pathlib import Path

from tests import runs


def test_each_name_is_that_of_a_test() -> None:
    """A test that is renamed would otherwise change its run unseen."""
    root = Path(__file__).parents[2]
    for name in (*runs.LEFT_TO_ALL, *runs.KEPT):
        path, _, test = name.partition("::")
        assert (root / path).exists(), name
        assert not test or f"def {test.partition('[')[0]}(" in (root / path).read_text(), name
