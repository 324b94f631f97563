"""The launcher that every test of this folder uses, and a way to run several scenarios in the time of one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.jobs.launching import AtOnce, Launcher, launching, run_at_once


@pytest.fixture
def rallyrun(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as launcher:
        yield launcher


@pytest.fixture
def at_once(tmp_path: Path) -> AtOnce:
    """See `run_at_once`, without its folder."""
    return partial(run_at_once, tmp_path)
