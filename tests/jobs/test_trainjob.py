"""A job in a TrainJob of Kubeflow: its last status reaches Trainer's server; a failed report changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.launching import Launcher
from tests.status_server import status_server

SCRIPT = """
from rallypoint import metrics, notices
metrics.report(total=40, loss=0.5)
for step in range(1, 41):
    notices.progress(step)
metrics.report(loss=0.25)
"""


@pytest.mark.parametrize("status", [200, 500])
def test_the_last_status_of_a_job(rallyrun: Launcher, tmp_path: Path, status: int) -> None:
    with status_server(tmp_path) as server:
        server.answer = (status, b"{}")
        job = rallyrun("--standalone", "--nproc-per-node=2", rallyrun.script(SCRIPT), env=server.environ)
        assert job.ends() == 0, job.err
        server.until_sent(1)
    (last,) = server.statuses
    assert last["progressPercentage"] == 100
    assert {"name": "step", "value": "40"} in last["metrics"]
    assert ("cannot be shown in the TrainJob" in job.err) == (status != 200)


def test_a_job_that_reports_no_steps_sends_nothing(rallyrun: Launcher, tmp_path: Path) -> None:
    with status_server(tmp_path) as server:
        job = rallyrun("--standalone", rallyrun.script("print('here')"), env=server.environ)
        assert job.ends() == 0
    assert server.requests == []
