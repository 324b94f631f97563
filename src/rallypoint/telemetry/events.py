"""Events: plain data with a form as JSON on one line (contract section 5.9)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from rallypoint.base.errors import user_error

EventMetadataValue: TypeAlias = str | int | float | bool | None


class EventSource(str, Enum):  # noqa: UP042 - its `str` is torch's: with the name of the class
    """Who an event is about."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # noqa: UP042 - as above
    """The state of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """Something that happened to an agent or a worker.

    `timestamp` is in whole epoch seconds; 0 if the log line that has the event has its own time.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """The event as JSON on one line."""
        return json.dumps(asdict(self) | {"source": self.source.name})

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """The event of a line; an event is returned unchanged. UserError if the line is not one."""
        if isinstance(data, Event):
            return data
        with _refusing(data, "an event"):
            fields = _fields(data)
            return Event(**{**fields, "source": EventSource[fields["source"]]})


@dataclass
class RdzvEvent:
    """Something that happened to a node in a rendezvous.

    `name` is where in the program it was recorded, `message` says what happened, `pid` is the agent's,
    `master_endpoint` the worker store's, `local_id` distinguishes a host's agents, and `error_trace` is the traceback
    of a failure.
    """

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """The event as JSON on one line."""
        return json.dumps(asdict(self) | {"node_state": self.node_state.name})

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """The event of a line; an event is returned unchanged. UserError if the line is not one."""
        if isinstance(data, RdzvEvent):
            return data
        with _refusing(data, "a rendezvous event"):
            fields = _fields(data)
            return RdzvEvent(**{**fields, "node_state": NodeState[fields["node_state"]]})


def _fields(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise TypeError(f"a {type(found).__name__}, where an object should be")
    return found


@contextmanager
def _refusing(line: str, what: str) -> Iterator[None]:
    """Raise a UserError for all the ways in which a line cannot be read."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise user_error(f"{line[:200]!r} is not {what} as JSON on one line ({reason})", error) from None
