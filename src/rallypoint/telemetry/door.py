"""What an agent may import at start-up: what costs one look-up in a dictionary until somebody wants it.

Nobody can have configured a handler in a module that was never imported, so where `telemetry.metrics` or
`telemetry.handlers` is not loaded there is nothing to do. A handler that fails costs a log line, never the job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from rallypoint.base.log import get_logger

P = ParamSpec("P")
R = TypeVar("R")

log = get_logger(__name__)

_METRICS = "rallypoint.telemetry.metrics"
_HANDLERS = "rallypoint.telemetry.handlers"


def metrics_wanted() -> bool:
    """Whether anybody could have set up a handler for metrics."""
    return _METRICS in sys.modules


def rendezvous_events_wanted() -> bool:
    """Whether anybody has set up a handler for the events of the rendezvous."""
    if _HANDLERS not in sys.modules:
        return False
    import logging

    from rallypoint.telemetry.handlers import RENDEZVOUS, get_logging_handler

    return not isinstance(get_logging_handler(RENDEZVOUS), logging.NullHandler)


def put(name: str, value: float) -> None:
    """Put one number into the agents' group, if anybody wants it."""
    if metrics_wanted():
        from rallypoint.telemetry.metrics import put_metric

        quietly("metrics", lambda: put_metric(name, value))


def profiled(function: Callable[P, R]) -> Callable[P, R]:
    """Count and time the calls of an agent's method, as `metrics.prof` does, if anybody wants it."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not metrics_wanted():
            return function(*args, **kwargs)
        import time

        began = time.monotonic()
        outcome = "failure"
        try:
            result = function(*args, **kwargs)
            outcome = "success"
            return result
        finally:
            put(f"{function.__qualname__}.{outcome}", 1)
            put(f"{function.__qualname__}.duration.ms", int((time.monotonic() - began) * 1000))

    return called


def quietly(what: str, tell: Callable[[], None]) -> None:
    """Call somebody's handler of `what`; what it raises becomes a log line."""
    try:
        tell()
    except Exception as error:
        log.warning("a handler of %s failed (%s: %s); the job goes on", what, type(error).__name__, error)
