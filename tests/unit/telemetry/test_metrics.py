"""Metrics: streams, handlers, and what `prof` puts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rallypoint.telemetry import metrics
from rallypoint.telemetry.metrics import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    initialize_metrics,
    prof,
    profile,
    publish_metric,
    put_metric,
)


class MemoryHandler(MetricHandler):
    """Keeps what it is given, without times."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, str, float]] = []

    def emit(self, metric_data: MetricData) -> None:
        value = 0 if metric_data.name.endswith(".ms") else metric_data.value
        self.seen.append((metric_data.group_name, metric_data.name, value))


@pytest.fixture(name="kept", autouse=True)
def _kept() -> Iterator[MemoryHandler]:
    kept = MemoryHandler()
    configure(kept)
    yield kept
    configure(NullMetricHandler())
    metrics._handlers.clear()


def test_a_group_has_its_own_handler_or_the_one_for_all(
    kept: MemoryHandler, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(ConsoleMetricHandler(), "mine")
    put_metric("a", 1)
    put_metric("b", 2, "mine")
    put_metric("c", 3, "theirs")
    assert kept.seen == [("torchelastic", "a", 1), ("theirs", "c", 3)]
    line = capsys.readouterr().out
    assert line.startswith("[")
    assert line.endswith("][mine]: b=2\n")


def test_a_stream_keeps_the_handler_that_it_was_made_with(kept: MemoryHandler) -> None:
    stream = getStream("g")
    configure(NullMetricHandler())
    stream.add_value("x", 1)
    getStream("g").add_value("y", 1)
    assert kept.seen == [("g", "x", 1)]


def test_calls_are_counted_and_timed(kept: MemoryHandler) -> None:
    class Some:
        @prof
        def works(self, number: int) -> int:
            """Doc."""
            return number

        @prof(group="g")
        def fails(self) -> int:
            raise KeyError("x")

    assert Some().works(4) == 4
    assert (Some.works.__name__, Some.works.__doc__) == ("works", "Doc.")
    with pytest.raises(KeyError):
        Some().fails()
    path = "test_calls_are_counted_and_timed.<locals>.Some"
    assert kept.seen == [
        ("torchelastic", f"{path}.works.success", 1),
        ("torchelastic", f"{path}.works.duration.ms", 0),
        ("g", f"{path}.fails.failure", 1),
        ("g", f"{path}.fails.duration.ms", 0),
    ]


@prof
def alone() -> None:
    """A function that is in no other."""


def test_a_function_of_a_module_goes_by_the_last_of_the_modules_names(kept: MemoryHandler) -> None:
    alone()
    assert kept.seen[0] == ("torchelastic", "test_metrics.alone.success", 1)


def test_deprecated_names_warn_and_work(kept: MemoryHandler) -> None:
    with pytest.warns(FutureWarning, match="use put_metric"):
        publish_metric("g", "n", 4)
    with pytest.warns(FutureWarning, match="use prof"):
        profiled = profile("g")(alone)
    profiled()
    name = "test_metrics.alone"
    assert [seen for seen in kept.seen if name not in seen[1]] == [
        ("g", "n", 4),
        ("g", "alone.success", 1),
        ("g", "alone.duration.ms", 0),
    ]


def test_small_things() -> None:
    assert get_elapsed_time_ms(0) > 0
    assert MetricsConfig().params == {}
    assert MetricsConfig({"a": "b"}).params == {"a": "b"}
    initialize_metrics(MetricsConfig())
