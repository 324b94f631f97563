"""Metrics: values, documentation, alerts and dashboards."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.membership.state import Outcome, Settings
from rallypoint.observe.metrics import (
    CONTENT_TYPE,
    METRICS,
    AgentAccount,
    Family,
    MetricKind,
    NodeReading,
    build_family,
    exposition,
    job_families,
    jobs_families,
    node_families,
)
from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import NodePhase
from rallypoint.observe.watching.session import copy_of_job, job_list
from tests.processes import completed

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool")


def everything() -> list[Family]:
    """All metrics, each with a sample."""
    common: dict[str, Any] = {"time": 1e9, "job": 'j"\n\\ü', "host": "a", "pid": 1}
    failure = events.Failure(rank=0, local_rank=0, host="a", pid=2, exit_code=-9, message="")
    account = AgentAccount()
    account.count(events.PhaseBegan(elapsed=1.0, phase=NodePhase.RUNNING, **common))
    account.count(events.WorkerFailed(elapsed=2.0, failure=failure, **common))
    account.count(events.WorkersStarted(elapsed=3.0, pids=(1,), **common))
    account.count(events.ProgressMade(elapsed=4.0, step=7, age=1.0, source="call", **common))
    node = NodeReading('j"\n\\ü', "a", "default", "c10d", 5.0, 2, 1, 3, [1e9, 0.0], account.read(5.0))
    job = Dispatcher(Settings('j"\n\\ü', 1, 2))
    snapshot = copy_of_job(job)()._replace(max_restarts=3)
    return [
        build_family(),
        *jobs_families(job_list(job).jobs, {Outcome.FAILED: 2}),
        *job_families([snapshot]),
        *node_families(node),
    ]


def series(text: str) -> dict[str, float]:
    found = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in found}


def exported_names() -> set[str]:
    """The names of all series, as in a query."""
    suffixes = {
        MetricKind.COUNTER: ("_total",),
        MetricKind.GAUGE: ("",),
        MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    }
    return {name + suffix for name, metric in METRICS.items() for suffix in suffixes[metric.kind]}


def test_every_metric_is_exported() -> None:
    kind, text = exposition(everything())
    assert kind == CONTENT_TYPE
    assert {name.partition("{")[0] for name in series(text.decode())} == exported_names()
    for metric, samples in everything():
        assert samples, metric.name
        assert all(len(sample.labels) == len(metric.labels) for sample in samples), metric.name


def test_values() -> None:
    found = series(exposition(everything())[1].decode())
    own = r'job_id="j\"\n\\ü"'
    assert found[f'rallypoint_phase_seconds_total{{{own},node="a",phase="rendezvous"}}'] == 1.0
    assert found[f'rallypoint_phase_seconds_total{{{own},node="a",phase="running"}}'] == 4.0
    assert found[f'rallypoint_agent_uptime_seconds{{{own},node="a"}}'] == 5.0
    assert found[f'rallypoint_worker_failures_total{{{own},kind="SIGKILL",node="a"}}'] == 1.0
    assert found[f'rallypoint_recovery_seconds_bucket{{{own},le="0.5",node="a"}}'] == 0.0
    assert found[f'rallypoint_recovery_seconds_bucket{{{own},le="1",node="a"}}'] == 1.0
    assert found[f'rallypoint_recovery_seconds_sum{{{own},node="a"}}'] == 1.0
    assert found[f'rallypoint_workers{{{own},node="a",state="running"}}'] == 1.0
    assert found[f'rallypoint_workers{{{own},node="a",state="exited"}}'] == 1.0
    assert found[f'rallypoint_job_phase{{{own},phase="waiting"}}'] == 1.0
    assert found[f"rallypoint_job_restarts_remaining{{{own}}}"] == 3.0
    ended = {outcome: found[f'rallypoint_jobs_ended_total{{outcome="{outcome}"}}'] for outcome in Outcome}
    assert ended == {"failed": 2.0, "succeeded": 0.0, "stopped": 0.0}, "from the start, so that increases show"
    assert not any("last_output" in name and 'local_rank="1"' in name for name in found)  # unknown


def test_every_metric_is_documented() -> None:
    rows = {}
    for line in (ROOT / "docs/reference/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `rallypoint_"):
            rows[cells[0].strip("`")] = (cells[1], tuple(re.findall(r"`(\w+)`", cells[2])))
    wanted = {
        name + ("_total" if metric.kind is MetricKind.COUNTER else ""): (metric.kind.value, metric.labels)
        for name, metric in METRICS.items()
    }
    assert rows == wanted


@pytest.mark.process
@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)")
def test_promtool_accepts_metrics_and_alerts() -> None:
    text = exposition(everything())[1]
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    for command in ("rules rallypoint-alerts.yaml", "config --syntax-only prometheus.yaml"):
        completed([str(PROMTOOL), "check", *command.split()], cwd=DEPLOY, check=True)


@pytest.mark.parametrize("file", ["rallypoint-alerts.yaml", "grafana-dashboard.json"])
def test_deployed_files_use_known_metrics(file: str) -> None:
    text = (DEPLOY / file).read_text()
    if file.endswith(".json"):
        dashboard = json.loads(text)
        text = "\n".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    used = set(re.findall(r"\brallypoint_[a-z0-9_]+", text.replace("job_id:rallypoint_running", "")))
    assert used
    assert used <= exported_names()
