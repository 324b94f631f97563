"""Where events go: handlers of Python's logging, by name.

Ours are in a table to which a program may add; other names are looked up among the installed entry points in the group
`rallypoint.event_handlers`: each is a handler, or something that makes one when it is called without arguments (a
class, say).
"""

from __future__ import annotations

import logging

from rallypoint.base.errors import UserError
from rallypoint.base.log import print_error_line
from rallypoint.base.plugins import plugin

GROUP = "rallypoint.event_handlers"
"""The entry point group of packages with a handler."""

RENDEZVOUS = "dynamic_rendezvous"
"""The events of the rendezvous go there, and nowhere unless a program, or a plug-in's module, replaces the handler of
this name.
"""


class ConsoleHandler(logging.Handler):
    """Writes one line for each record to standard error, without a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error_line(self.format(record))
        except Exception:
            self.handleError(record)


log_handlers: dict[str, logging.Handler] = {
    "console": ConsoleHandler(),
    RENDEZVOUS: logging.NullHandler(),
    "null": logging.NullHandler(),
}
"""Handlers by name. A program may add or replace one, before its first event."""


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """The handler of a name; one of an entry point is loaded once. UserError if there is none, or it cannot be used."""
    found = log_handlers.get(destination)
    if found is None:
        found = log_handlers[destination] = _made_handler(destination)
    return found


def takes_agent_events(destination: str) -> bool:
    """Whether the handler of a name wants `agent_events` as well as torch's: it says so by an attribute of this name.

    Raises:
        UserError: see `get_logging_handler`.
    """
    return bool(getattr(get_logging_handler(destination), "takes_agent_events", False))


def _made_handler(destination: str) -> logging.Handler:
    if destination.startswith("jsonl:"):
        from rallypoint.telemetry.json_lines import JsonLinesHandler

        return JsonLinesHandler(destination.removeprefix("jsonl:"))
    return _plugin_handler(destination)


def _plugin_handler(destination: str) -> logging.Handler:
    made = plugin(
        GROUP, destination, "event handler", log_handlers, lambda offer: offer() if callable(offer) else offer
    )
    if not isinstance(made, logging.Handler):
        raise UserError(
            f"the event handler {destination!r} is a {type(made).__name__}; its entry point must name a "
            "logging.Handler, or something that makes one when it is called without arguments"
        )
    return made
