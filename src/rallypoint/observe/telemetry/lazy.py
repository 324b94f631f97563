"""What an agent may import at start-up: one look-up in a dictionary, until a handler is configured.

A handler can only be configured in an imported module, so nothing is done while `observe.telemetry.metrics` or
`observe.telemetry.handlers` is not loaded. A handler that fails is logged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps

from rallypoint.base.light_typing import ParamSpec, TypeVar
from rallypoint.base.log import get_logger

log = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_METRICS = "rallypoint.observe.telemetry.metrics"
_HANDLERS = "rallypoint.observe.telemetry.handlers"


def metrics_wanted() -> bool:
    return _METRICS in sys.modules


def rendezvous_events_wanted() -> bool:
    if _HANDLERS not in sys.modules:
        return False
    import logging

    from rallypoint.observe.telemetry.handlers import RENDEZVOUS, get_logging_handler

    return not isinstance(get_logging_handler(RENDEZVOUS), logging.NullHandler)


def put_metric_if_wanted(name: str, value: float) -> None:
    if metrics_wanted():
        from rallypoint.observe.telemetry.metrics import put_metric

        logging_errors("metrics", lambda: put_metric(name, value))


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count and time calls under torch's name for a method, as `metrics.prof`, if a handler may be configured."""

    def profile(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def profiled_call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not metrics_wanted():
                return function(*args, **kwargs)
            began, outcome = time.monotonic(), "failure"
            try:
                result = function(*args, **kwargs)
                outcome = "success"
            finally:
                put_metric_if_wanted(f"{name}.{outcome}", 1)
                put_metric_if_wanted(f"{name}.duration.ms", int((time.monotonic() - began) * 1000))
            return result

        return profiled_call

    return profile


def logging_errors(what: str, call: Callable[[], None]) -> None:
    """Call somebody's handler of `what`; an exception is logged."""
    try:
        call()
    except Exception as error:
        log.warning("a handler of %s failed (%s: %s); the job continues", what, type(error).__name__, error)
