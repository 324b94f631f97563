"""Events: plain data with a form as JSON on one line (contract section 5.9)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import ClassVar, Self, TypeAlias

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
class _JsonEvent:
    """A dataclass with a form as JSON on one line; `_FORM` is what it is, and the name and type of its enum."""

    _FORM: ClassVar[tuple[str, str, type[Enum]]]

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        """The event of a line; an event is returned unchanged. UserError if the line is not one."""
        if isinstance(data, cls):
            return data
        line, (what, name, kind) = str(data), cls._FORM
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise TypeError(f"a {type(fields).__name__}, where an object should be")
            return cls(**{**fields, name: kind[fields[name]]})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise user_error(f"{line[:200]!r} is not {what} as JSON on one line ({reason})", error) from None


@dataclass
class Event(_JsonEvent):
    """Something that happened to an agent or a worker.

    `timestamp` is in whole epoch seconds; 0 if the log line that has the event has its own time.
    """

    _FORM = "an event", "source", EventSource

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)


@dataclass
class RdzvEvent(_JsonEvent):
    """Something that happened to a node in a rendezvous.

    `name` is where in the program it was recorded, `message` says what happened, `pid` is the agent's,
    `master_endpoint` the worker store's, `local_id` distinguishes a host's agents, and `error_trace` is the traceback
    of a failure.
    """

    _FORM = "a rendezvous event", "node_state", NodeState

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
