"""Metrics: named numbers in groups. Each group has a handler (contract sections 5.9 and 8).

They are ignored until a program calls `configure`.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps

from rallypoint.base.light_typing import NamedTuple, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
T = TypeVar("T")

DEFAULT_GROUP = "torchelastic"


class _Decorator(Protocol):
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


class MetricData(NamedTuple):
    """One number; `timestamp` is in epoch seconds."""

    timestamp: float
    group_name: str | None
    name: str
    value: float


class MetricsConfig:
    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(ABC):
    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Handle a metric. Runs on the thread that put it, which waits."""


class ConsoleMetricHandler(MetricHandler):
    """Prints numbers to standard output: `[timestamp][group]: name=value`."""

    def emit(self, metric_data: MetricData) -> None:
        print(f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}")


class NullMetricHandler(MetricHandler):
    def emit(self, metric_data: MetricData) -> None:
        return


class MetricStream:
    def __init__(self, group_name: str | None, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_default_handler: MetricHandler = NullMetricHandler()
_handlers: dict[str, MetricHandler] = {}


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler for a group, or the default for groups without one."""
    global _default_handler
    if group is None:
        _default_handler = handler
    else:
        _handlers[group] = handler


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing, as in torch; some programs call it."""


def getStream(group: str | None) -> MetricStream:
    """A stream to a group's current handler."""
    handler = _default_handler if group is None else _handlers.get(group, _default_handler)
    return MetricStream(group, handler)


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Deprecated: `put_metric` with its arguments in another order."""
    warnings.warn("publish_metric is deprecated; use put_metric", FutureWarning, stacklevel=2)
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[P, R], group: str = DEFAULT_GROUP) -> Callable[P, R]: ...


@overload
def prof(fn: None = None, group: str = DEFAULT_GROUP) -> _Decorator: ...


def prof(fn: Callable[P, R] | None = None, group: str = DEFAULT_GROUP) -> Callable[P, R] | _Decorator:
    """Count and time calls of a function: `@prof`, or `@prof(group="mine")`.

    Each call puts `<name>.success` or `<name>.failure` (1), and `<name>.duration.ms`. The name is the qualified one
    (`Class.method`); for a function outside a class, it starts with the last part of its module's name.
    """

    def measured(function: Callable[Q, T], /) -> Callable[Q, T]:
        return _measured(function, _name(function), group)

    return measured if fn is None else measured(fn)


def profile(group: str | None = None) -> _Decorator:
    """Deprecated: `prof` under the function's bare name."""
    warnings.warn("profile is deprecated; use prof", FutureWarning, stacklevel=2)

    def measured(function: Callable[Q, T], /) -> Callable[Q, T]:
        return _measured(function, function.__name__, group)

    return measured


def _name(function: Callable[..., object]) -> str:
    qualified = function.__qualname__
    return qualified if "." in qualified else f"{function.__module__.rpartition('.')[2]}.{qualified}"


def _measured(function: Callable[P, R], name: str, group: str | None) -> Callable[P, R]:
    @wraps(function)
    def measured(*args: P.args, **kwargs: P.kwargs) -> R:
        began = time.monotonic()
        outcome = "failure"
        try:
            result = function(*args, **kwargs)
            outcome = "success"
            return result
        finally:
            stream = getStream(group)
            stream.add_value(f"{name}.{outcome}", 1)
            stream.add_value(f"{name}.duration.ms", int((time.monotonic() - began) * 1000))

    return measured
