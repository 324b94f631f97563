"""The destinations of events: logging handlers by name, each behind its own logger (contract section 5.9).

A logger is named `torchelastic-events-<destination>`, so that users' handlers for torch's loggers work here too. Its
level is `LOGLEVEL` or INFO.

Our handlers are in a table that a program may extend. Other names are looked up in the entry point group
`rallypoint.event_handlers`. Each is a handler, or a callable without arguments that returns one, such as a class.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback

from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import StderrHandler, log_level
from rallypoint.base.plugins import plugin
from rallypoint.observe.telemetry.agent_events import Event, NodeState, RdzvEvent

if TYPE_CHECKING:
    from rallypoint.observe.telemetry.agent_events import AgentEvent

GROUP = "rallypoint.event_handlers"
"""The entry point group for packages that provide a handler."""

RENDEZVOUS = "dynamic_rendezvous"
"""The destination of rendezvous events, which are dropped unless a program or a plug-in's module replaces its handler.
"""


log_handlers: dict[str, logging.Handler] = {
    "console": StderrHandler(),
    RENDEZVOUS: logging.NullHandler(),
    "null": logging.NullHandler(),
}
"""Handlers by name. A program can add or replace a handler before its first event."""


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler `destination`; load a plug-in once. Raises UserError if it is unknown or unusable."""
    handler = log_handlers.get(destination)
    if handler is None:
        handler = log_handlers[destination] = _made_handler(destination)
    return handler


def takes_agent_events(destination: str) -> bool:
    """Whether the handler accepts `agent_events` in addition to torch's; see its attribute with this name."""
    return bool(getattr(get_logging_handler(destination), "takes_agent_events", False))


def _made_handler(destination: str) -> logging.Handler:
    if destination.startswith("jsonl:"):
        from rallypoint.observe.telemetry.json_lines import JsonLinesHandler

        return JsonLinesHandler(destination.removeprefix("jsonl:"))
    return _plugin_handler(destination)


def _plugin_handler(destination: str) -> logging.Handler:
    handler = plugin(
        GROUP, destination, "event handler", log_handlers, lambda offer: offer() if callable(offer) else offer
    )
    if not isinstance(handler, logging.Handler):
        raise UserError(
            f"the event handler {destination!r} is a {type(handler).__name__}; its entry point must name a "
            "logging.Handler, or a callable that needs no arguments and returns one"
        )
    return handler


# Recording

_loggers: dict[str, logging.Logger] = {}


def record(event: Event, destination: str = "null") -> None:
    """Send an event to the handler `destination`. Raises UserError if it is unknown."""
    _send(_logger(destination), event)


def record_agent_event(event: AgentEvent, destination: str) -> None:
    """Send an event to the handler `destination` if it accepts agents' events. Raises UserError if the handler is
    unknown.
    """
    from rallypoint.observe.telemetry.agent_events import encode

    _logger(destination).info("%s", encode(event).decode(), extra={"rallypoint_event": event})


def record_rdzv_event(event: RdzvEvent) -> None:
    _send(_logger(RENDEZVOUS), event)


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Create a rendezvous event and record it, if a handler is configured.

    In the event's name, `name` follows the caller's file name; it defaults to the caller's function. Host and process
    default to this one. With FAILED, the traceback of the handled exception is added. For the other arguments see
    `RdzvEvent`.
    """
    if isinstance(get_logging_handler(RENDEZVOUS), logging.NullHandler):
        return
    caller = sys._getframe(1).f_code
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or socket.gethostname(),
            pid=os.getpid() if pid is None else pid,
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=traceback.format_exc() if node_state is NodeState.FAILED else "",
        )
    )


def _logger(destination: str) -> logging.Logger:
    logger = _loggers.get(destination)
    if logger is None:
        handler = get_logging_handler(destination)
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        of_user = "LOGLEVEL" in os.environ and not getattr(handler, "takes_agent_events", False)
        logger.setLevel(log_level() if of_user else logging.INFO)
        logger.propagate = False
        logger.addHandler(handler)
        _loggers[destination] = logger
    return logger


def _send(logger: logging.Logger, event: Event | RdzvEvent) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info(event.serialize(), extra={"rallypoint_event": event})
