"""The lazy gate at start-up, failing handlers, and the share of restarts.

tests/conformance/test_telemetry.py and test_events.py compare the contents with torch's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from rallypoint.agent.events import AgentEvents, flakiness
from rallypoint.observe.telemetry import handlers, metrics
from rallypoint.observe.telemetry.handlers import log_handlers
from rallypoint.observe.telemetry.lazy import profiled, put_metric_if_wanted
from tests.processes import completed
from tests.unit.agent.thread_workers import ThreadWorkers


class MemoryMetrics(metrics.MetricHandler):
    """Keeps the metrics."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, str, float]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.seen.append((metric_data.group_name, metric_data.name, metric_data.value))


@pytest.fixture(name="seen")
def _seen() -> Iterator[MemoryMetrics]:
    kept = MemoryMetrics()
    metrics.configure(kept)
    yield kept
    metrics.configure(metrics.NullMetricHandler())


def test_failing_handlers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenEvents(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("full")

    class BrokenMetrics(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            raise OSError("full")

    log_handlers["broken"] = BrokenEvents()
    metrics.configure(BrokenMetrics())
    try:
        workers = ThreadWorkers(lambda rank, start, stopping: rank)
        workers.group.spec.event_log_handler = "broken"
        with AgentEvents(workers).duration("RENDEZVOUS"):
            pass
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "OSError: full" in line
        caplog.clear()
        assert run(fails=False) == 5
        assert len(caplog.messages) == 2
    finally:
        handlers._loggers.pop("broken").handlers.clear()
        metrics.configure(metrics.NullMetricHandler())


@profiled("SimpleElasticAgent.run")
def run(fails: bool) -> int:
    if fails:
        raise KeyError("x")
    return 5


def test_the_lazy_gate(seen: MemoryMetrics) -> None:
    assert run(fails=False) == 5
    with pytest.raises(KeyError):
        run(fails=True)
    put_metric_if_wanted("a", 1)
    parts = ("success", "duration.ms", "failure", "duration.ms")
    assert [name for _, name, _ in seen.seen] == [*(f"SimpleElasticAgent.run.{part}" for part in parts), "a"]
    assert {group for group, _, _ in seen.seen} == {"torchelastic"}


@pytest.mark.process
def test_the_lazy_gate_imports_nothing() -> None:
    code = (
        "import rallypoint.observe.telemetry.lazy as lazy, sys\n"
        "lazy.put_metric_if_wanted('a', 1)\n"
        "lazy.profiled('run')(lambda: None)()\n"
        "print(sorted(name for name in sys.modules if name.startswith('rallypoint.observe.telemetry')))"
    )
    shown = completed([sys.executable, "-c", code], check=True).stdout
    assert shown == "['rallypoint.observe.telemetry', 'rallypoint.observe.telemetry.lazy']\n"


@pytest.mark.parametrize(
    ("failed", "remaining", "most", "percent"),
    [(False, 3, 3, 0), (False, 0, 1, 50), (False, 0, 0, 0), (False, 1, 3, 50), (True, 3, 3, 100), (False, 2, 3, 25)],
)
def test_flakiness(failed: bool, remaining: int, most: int, percent: int) -> None:
    assert flakiness(failed, remaining, most) == percent
