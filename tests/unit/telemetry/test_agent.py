"""The lazy gate at start-up, handlers that fail, and the share of restarts.

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
    """Keeps what it is given."""

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


def test_an_event_handler_that_fails_costs_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("full")

    log_handlers["broken"] = Broken()
    try:
        workers = ThreadWorkers(lambda rank, start, stopping: rank)
        workers.group.spec.event_log_handler = "broken"
        with AgentEvents(workers).duration("RENDEZVOUS"):
            pass
    finally:
        handlers._loggers.pop("broken").handlers.clear()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "OSError: full" in lines[0]


class Agent:
    """Something with a method that is profiled."""

    @profiled("SimpleElasticAgent.run")
    def run(self, fails: bool) -> int:
        if fails:
            raise KeyError("x")
        return 5


def test_the_lazy_gate_counts_calls_and_puts_numbers(seen: MemoryMetrics) -> None:
    assert Agent().run(False) == 5
    with pytest.raises(KeyError):
        Agent().run(True)
    put_metric_if_wanted("a", 1)
    names = [*(f"SimpleElasticAgent.run.{each}" for each in ("success", "duration.ms", "failure", "duration.ms")), "a"]
    assert [name for _, name, _ in seen.seen] == names
    assert {group for group, _, _ in seen.seen} == {"torchelastic"}


def test_a_metric_handler_that_fails_costs_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            raise OSError("full")

    metrics.configure(Broken())
    try:
        assert Agent().run(False) == 5
    finally:
        metrics.configure(metrics.NullMetricHandler())
    assert len(caplog.messages) == 2


@pytest.mark.process
def test_the_lazy_gate_loads_nothing() -> None:
    code = (
        "import rallypoint.observe.telemetry.lazy as lazy, sys\n"
        "lazy.put_metric_if_wanted('a', 1)\n"
        "lazy.profiled('run')(lambda: None)()\n"
        "print(sorted(each for each in sys.modules if each.startswith('rallypoint.observe.telemetry')))"
    )
    shown = completed([sys.executable, "-c", code], check=True).stdout
    assert shown == "['rallypoint.observe.telemetry', 'rallypoint.observe.telemetry.lazy']\n"


@pytest.mark.parametrize(
    ("failed", "remaining", "most", "percent"),
    [(False, 3, 3, 0), (False, 0, 1, 50), (False, 0, 0, 0), (False, 1, 3, 50), (True, 3, 3, 100), (False, 2, 3, 25)],
)
def test_flakiness(failed: bool, remaining: int, most: int, percent: int) -> None:
    assert flakiness(failed, remaining, most) == percent
