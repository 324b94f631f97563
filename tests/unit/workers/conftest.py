"""The reaper that starts the workers in the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rallypoint.workers.reaper.client import ReaperClient
from tests.unit.workers.test_process import guarded


@pytest.fixture
def reaper() -> Iterator[ReaperClient]:
    with guarded() as reaper:
        yield reaper
