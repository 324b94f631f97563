"""Some seconds of what `make fuzz` does for longer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz.store import CannotFuzzError, build, run, seeds


@pytest.mark.process
def test_arbitrary_clients_do_not_break_the_store_in_c(tmp_path: Path) -> None:
    try:
        build(tmp_path / "fuzzer")
    except CannotFuzzError as error:
        pytest.skip(str(error))
    seeds(tmp_path / "corpus")
    executed, end = 0, time.monotonic() + 120
    while executed <= 100 and time.monotonic() < end:  # once, but on a machine that lets the fuzzer wait
        executed += run(tmp_path / "fuzzer", tmp_path / "corpus", 5)
    assert executed > 100
