"""One Slurm per process for the tests of this folder. If this machine cannot have one, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, slurm, why_not
from tests.slurm.jobs import SlurmJobs


@pytest.fixture(scope="session")
def the_slurm() -> Iterator[Slurm]:
    if (reason := why_not()) is not None:
        pytest.skip(f"SLURM TESTS DID NOT RUN: {reason}")
    with slurm(nodes=3) as cluster:
        yield cluster


@pytest.fixture
def jobs(the_slurm: Slurm, tmp_path: Path) -> Iterator[SlurmJobs]:
    made = SlurmJobs(the_slurm, tmp_path)
    yield made
    made.close()
