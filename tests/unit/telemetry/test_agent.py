"""What an agent records: its lazy gate at start-up, the events of its run, and its numbers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from rallypoint.telemetry import metrics, recording, run_metrics
from rallypoint.telemetry.event_factory import EventFactory
from rallypoint.telemetry.events import Event, EventSource
from rallypoint.telemetry.handlers import log_handlers
from rallypoint.telemetry.lazy import profiled, put_metric_if_wanted
from tests.unit.health.test_progress_probe import HandClock
from tests.unit.telemetry.test_events import MemoryHandler
from tests.unit.telemetry.test_metrics import MemoryHandler as MemoryMetrics


class Worker(NamedTuple):
    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    id: int


class Group(NamedTuple):
    group_rank: int | None
    group_world_size: int | None
    workers: tuple[Worker, ...]


class Failure(NamedTuple):
    exitcode: int
    pid: int
    error_file_data: Mapping[str, object]


GROUP = Group(1, 2, (Worker(0, 2, 2, 4, 70), Worker(1, 3, 3, 4, 71)))


@pytest.fixture(name="events")
def _events() -> Iterator[MemoryHandler]:
    kept = log_handlers["kept"] = MemoryHandler()
    yield kept
    del log_handlers["kept"]
    recording._loggers.pop("kept", None)
    logging.getLogger("torchelastic-events-kept").handlers.clear()


@pytest.fixture(name="seen")
def _seen() -> Iterator[MemoryMetrics]:
    kept = MemoryMetrics()
    metrics.configure(kept)
    yield kept
    metrics.configure(metrics.NullMetricHandler())


def an_event_factory(clock: HandClock | None = None, destination: str = "kept") -> EventFactory:
    return EventFactory(
        destination,
        "job",
        "trainer",
        "c10d",
        "/usr/bin/python3",
        clock=clock or HandClock(),
        wall_clock=lambda: 1700000000.9,
    )


def recorded(events: MemoryHandler) -> list[tuple[str, str, object]]:
    found = map(Event.deserialize, events.lines)
    return [(each.source, str(each.metadata["state"]), each.metadata["global_rank"]) for each in found]


def test_the_fields_of_an_agents_event(events: MemoryHandler) -> None:
    clock = HandClock()
    factory = an_event_factory(clock)
    clock.now += 7.9
    factory.step_done("RENDEZVOUS", Group(None, None, ()), 1, 0.25)
    (event,) = map(Event.deserialize, events.lines)
    assert (event.name, event.source) == ("torchelastic.worker.status.RENDEZVOUS", EventSource.AGENT)
    assert (event.timestamp, event.metadata["total_run_time"]) == (1700000000, 7)
    assert (event.metadata["duration_ms"], event.metadata["agent_restarts"]) == (250.0, 1)
    assert event.metadata["metadata"] == json.dumps({"group_world_size": None, "entry_point": "python3"})


def test_the_end_of_workers(events: MemoryHandler) -> None:
    factory = an_event_factory()
    factory.workers_started(GROUP, 0)
    factory.workers_ended("SUCCEEDED", GROUP, 0, {})
    factory.workers_ended("FAILED", GROUP, 0, {3: Failure(-9, 71, {"message": "é"})})
    factory.workers_ended("", GROUP, 0, {}, succeeded=[2])
    factory.record(factory.agent_event("SUCCEEDED", GROUP, 0))
    assert recorded(events) == [
        ("WORKER", "START", 2),
        ("WORKER", "START", 3),
        ("WORKER", "SUCCEEDED", 2),
        ("WORKER", "SUCCEEDED", 3),
        ("WORKER", "TERMINATED", 2),
        ("WORKER", "FAILED", 3),
        ("WORKER", "SUCCEEDED", 2),
        ("WORKER", "TERMINATED", 3),
        ("AGENT", "SUCCEEDED", None),
    ]
    failed = Event.deserialize(events.lines[5])
    assert failed.metadata["raw_error"] == json.dumps({"message": "é"})
    more = json.loads(str(failed.metadata["metadata"]))
    assert (more["exit_code"], more["worker_pid"], more["local_rank"]) == ([-9], [71], [1])


def test_a_handler_that_fails_costs_a_log_line(events: MemoryHandler, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("full")

    log_handlers["kept"] = Broken()
    an_event_factory().workers_started(GROUP, 0)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == ["a handler of events failed (OSError: full); the job goes on"] * 2


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
        "import rallypoint.telemetry.lazy as lazy, sys\n"
        "lazy.put_metric_if_wanted('a', 1)\n"
        "lazy.profiled('run')(lambda: None)()\n"
        "print(sorted(each for each in sys.modules if each.startswith('rallypoint.telemetry')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "['rallypoint.telemetry', 'rallypoint.telemetry.lazy']\n"


@pytest.mark.parametrize(
    ("failed", "remaining", "most", "percent"),
    [(False, 3, 3, 0), (False, 0, 1, 50), (False, 0, 0, 0), (False, 1, 3, 50), (True, 3, 3, 100), (False, 2, 3, 25)],
)
def test_flakiness(failed: bool, remaining: int, most: int, percent: int) -> None:
    assert run_metrics.flakiness(failed, remaining, most) == percent


def test_the_numbers_of_a_run(seen: MemoryMetrics) -> None:
    run_metrics.put_worker_state("trainer", "HEALTHY", 2)
    run_metrics.put_run_result("trainer", True, 2, 3)
    assert [(name, value) for _, name, value in seen.seen] == [
        ("workers.trainer.remaining_restarts", 2),
        ("workers.trainer.healthy", 1),
        ("workers.trainer.flakiness", 100),
        ("workers.trainer.run_total", 1),
        ("workers.trainer.run_success_with_retries", 0),
        ("workers.trainer.run_success_no_retries", 0),
        ("workers.trainer.run_failed_with_retries", 1),
        ("workers.trainer.run_failed_no_retries", 0),
    ]


class Timer(NamedTuple):
    worker_pid: int
    scope_id: str
    expiration_time: float
    signal: int


def test_events_of_the_watchdog() -> None:
    factory = EventFactory("null", "job", "r", "c10d", "/bin/sh")
    started = factory.watchdog_event("watchdog started", GROUP, 1, None)
    expired = factory.watchdog_event("timer expired", GROUP, 1, Timer(70, "s", 1.5, 9))
    assert (started.name, expired.name) == ("watchdog started", "timer expired")
    assert json.loads(str(started.metadata["metadata"])) == {"watchdog_event": "watchdog started"}
    assert json.loads(str(expired.metadata["metadata"])) == {
        "watchdog_event": "timer expired",
        "worker_pid": "70",
        "scope_id": "s",
        "expiration_time": "1.5",
        "signal": "9",
    }
    for event in (started, expired):
        assert event.source is EventSource.AGENT
        named = [event.metadata[name] for name in ("run_id", "role", "state", "group_rank", "agent_restarts")]
        assert named == ["job", "r", "RUNNING", 1, 1]
        assert "duration_ms" not in event.metadata
