"""The part of telemetry that an agent imports at start-up: one dictionary look-up until a handler is configured.

Only an imported module can configure a handler, so nothing happens unless `observe.telemetry.metrics` or
`observe.telemetry.handlers` is loaded. Handlers are users' code. Laws:

1. A handler that fails is logged.
2. While an agent runs (`handlers_beside`), handlers are called in order on a separate thread: a hung one delays no job.
   Calls that do not fit into its queue are dropped, and one line at the end reports how many.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps

from rallypoint.base.light_typing import ParamSpec, TypeVar
from rallypoint.base.log import get_logger
from rallypoint.base.side_thread import SideThread

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

        to_handlers("metrics", lambda: put_metric(name, value))


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count and time calls under torch's name for a method (`metrics.prof`), if a handler might be configured."""

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


def to_handlers(what: str, call: Callable[[], None]) -> None:
    """Call users' handlers (`what`: event or metrics) on the thread of `handlers_beside` if any. Log exceptions."""
    if _side is None or _side.runs_this():
        _call(what, call)
    else:
        _side.post(what, partial(_call, what, call))


@contextmanager
def handlers_beside() -> Iterator[None]:
    """Call handlers on a separate thread inside the `with`. At the end, they have some seconds to finish."""
    global _side
    if _side is not None and not _side.closed:  # another agent runs in this process
        yield
        return
    _side = side = SideThread("rallypoint-handlers", _failed)
    try:
        yield
    finally:
        left = side.close(_FLUSH)
        if side.busy_for():  # `side` stays closed, so that later calls are dropped instead of waiting too
            side.dropped += len(left)
            log.warning("an event or metrics handler has been running for %.0f s and was abandoned", side.busy_for())
        else:
            _side = None
            for work in left:  # no thread could be started
                work.run()
        if side.dropped:
            log.warning("%d events and metrics were dropped because their handlers were too slow", side.dropped)


def _call(what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        log.warning("the %s handler failed (%s: %s); the job continues", what, type(error).__name__, error)


def _failed(what: str) -> None:
    """Do nothing; never called, since `_call` does not raise."""


def _reset_after_fork() -> None:
    global _side
    _side = None


_side: SideThread | None = None
_FLUSH = 5.0
"""Seconds to wait for handlers when a run ends."""

os.register_at_fork(after_in_child=_reset_after_fork)
