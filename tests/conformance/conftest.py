"""The launcher of whole jobs, for tests in this folder that start some, and torch's answers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.conformance.record import FOLDER, Mode, Record
from tests.effort import is_fresh
from tests.jobs.launching import Launcher, launching


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Record:
    """What real torch answers, live or recorded."""
    folder = request.config.getoption("records") or FOLDER
    usual = Mode.DAILY if is_fresh() else Mode.RECORDED
    return Record(Path(folder), Mode(request.config.getoption("torch") or usual), datetime.now(UTC).toordinal())
