"""Metrics as Prometheus reads them, by `prometheus-client`, which is imported here alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rallypoint.base.errors import RallypointError
from rallypoint.observe.metrics import Distribution, Family, Kind

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric as ClientMetric
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise RallypointError("/metrics needs prometheus-client; install rallypoint[metrics] on this machine") from missing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLASSES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}


class _Once(Collector):
    """Hands out what was gathered."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[ClientMetric]:
        for (kind, name, text, labels, _), samples in self._families:
            if kind is Kind.HISTOGRAM:
                histogram = HistogramMetricFamily(name, text, labels=labels)
                for values, value in samples:
                    if isinstance(value, Distribution):
                        histogram.add_metric(values, _buckets(value), value.sum)
                yield histogram
                continue
            family = _CLASSES[kind](name, text, labels=labels)
            for values, value in samples:
                if not isinstance(value, Distribution):
                    family.add_metric(values, value)
            yield family


def _buckets(value: Distribution) -> list[tuple[str, float]]:
    names = [*(f"{each:g}" for each in value.bounds), "+Inf"]
    return list(zip(names, value.counts, strict=True))


def exposition(families: Sequence[Family]) -> tuple[str, bytes]:
    """The media type and the text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families))
    return CONTENT_TYPE, generate_latest(registry)
