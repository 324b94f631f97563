"""A full disk under the log folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, mounted

SIZE = 512 * 1024
LINES = 20_000
TALKER = f"""
import sys
for number in range({LINES}):
    print(f"line {{number}} " + "x" * 100, flush=number % 1000 == 0)
print("all said", flush=True)
"""


@pytest.fixture
def small_disk(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "logs"
    mounted(folder, SIZE)
    yield folder
    # The fixture `cluster` looks after processes; what still writes here would keep the disk.
    for job in cluster.launcher.jobs:
        job.stop()
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


@pytest.mark.parametrize("option", ["--redirects=3", "--tee=3"])
def test_a_worker_that_cannot_write_its_log_fails_and_the_report_says_why(
    cluster: Cluster, small_disk: Path, option: str
) -> None:
    """The worker writes the file itself, so it is the worker that the system refuses; it cannot even say so there."""
    cluster.nnodes = "1"
    script = cluster.launcher.script(TALKER, "talker.py")
    agent = cluster.run("A", [f"--log-dir={small_disk}", option, script])
    assert agent.job.ends() == 1
    said = [line for line in agent.job.err.splitlines() if "disk is full" in line and str(small_disk) in line]
    assert len(said) == 1, agent.job.err
