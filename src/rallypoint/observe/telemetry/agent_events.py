"""One agent's events, one JSON object per line (`docs/reference/events.md`), and the phases of its node, without gaps,
so that they add up. Pure.

Laws:

1. Every line names its job, host and agent, so a file can contain lines from many agents.
2. Times are seconds since the agent started (`elapsed`), unaffected by changes of the clock; `time` is for display and
   for comparing agents.
3. Fields may be added, but never change their meaning. Readers skip unknown kinds and fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import ClassVar, Self, TypeAlias

import msgspec

from rallypoint.base.errors import user_error
from rallypoint.base.light_typing import Any

EventMetadataValue: TypeAlias = str | int | float | bool | None


class EventSource(str, Enum):  # noqa: UP042 - its `str` is torch's: with the name of the class
    """The subject of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # noqa: UP042 - as above
    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class _JsonEvent:
    """A dataclass that is stored as one line of JSON. `_FORM` has its kind, and its enum's field name and type."""

    _FORM: ClassVar[tuple[str, str, type[Enum]]]

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        """Parse a line; return an event unchanged. Raises UserError if the line is not an event."""
        if isinstance(data, cls):
            return data
        line, (what, name, kind) = str(data), cls._FORM
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise TypeError(f"a {type(fields).__name__} instead of an object")
            return cls(**{**fields, name: kind[fields[name]]})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise user_error(f"{line[:200]!r} is not {what} as JSON on one line ({reason})", error) from None


@dataclass
class Event(_JsonEvent):
    """An event of an agent or a worker, as in torch.

    `timestamp` is in whole epoch seconds; 0 if the event's log line has its own time.
    """

    _FORM = "an event", "source", EventSource

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)


@dataclass
class RdzvEvent(_JsonEvent):
    """A node's event in a rendezvous.

    `name` is the place in the program that recorded the event, `message` describes it, `pid` is the agent's,
    `master_endpoint` the worker store's, `local_id` distinguishes a host's agents, and `error_trace` is a traceback.
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


VERSION = 1


class NodePhase(StrEnum):
    RENDEZVOUS = "rendezvous"
    """The node is waiting for a place in a round."""
    HELD_BACK = "held_back"
    """The node is waiting: the next round is delayed after failures without progress."""
    STARTING = "starting"
    """The node has a place and is starting its workers."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The node noticed a failure, or is stopping its workers for another reason."""


class PhaseClock:
    """Counts how many seconds a node spends in each phase, starting at `now`. They add up to the elapsed time."""

    def __init__(self, now: float) -> None:
        self.phase = NodePhase.RENDEZVOUS
        self._since = now
        self._held_until = now
        self._seconds = dict.fromkeys(NodePhase, 0.0)

    def enter(self, phase: NodePhase, now: float, held_back: float = 0.0) -> None:
        """Start another phase; `held_back` seconds of HELD_BACK count as that, and the rest as RENDEZVOUS."""
        self._seconds = self.seconds(now)
        self.phase, self._since, self._held_until = phase, now, now + held_back

    def seconds(self, now: float) -> dict[NodePhase, float]:
        seconds = dict(self._seconds)
        if self.phase is NodePhase.HELD_BACK:
            back_off = max(0.0, min(now, self._held_until) - self._since)
            seconds[NodePhase.HELD_BACK] += back_off
            seconds[NodePhase.RENDEZVOUS] += now - self._since - back_off
        else:
            seconds[self.phase] += now - self._since
        return seconds


class AgentEvent(msgspec.Struct, kw_only=True, frozen=True, tag_field="event"):
    """The fields of all lines.

    `time` is in epoch seconds, `elapsed` in seconds since the agent started. `pid` is the agent's. `round` is the last
    round in which the node had a place, -1 before the first.
    """

    version: int = VERSION
    time: float
    elapsed: float
    job: str
    host: str
    pid: int
    round: int = -1


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """A worker's failure. `exit_code` is -N after signal N; `message` is one line."""

    rank: int
    local_rank: int
    host: str
    pid: int
    exit_code: int
    message: str


class AgentStarted(AgentEvent, kw_only=True, frozen=True, tag="agent_started"):
    role: str
    program: str
    backend: str
    local_world_size: int
    max_restarts: int


class PhaseBegan(AgentEvent, kw_only=True, frozen=True, tag="phase"):
    """The node entered another phase. `seconds` is the delay of a round, if any."""

    phase: NodePhase
    seconds: float = 0.0


class RoundStarted(AgentEvent, kw_only=True, frozen=True, tag="round_started"):
    """The node got a place in a round. Its workers' global ranks start at `first_rank`.

    `origin` names the coordinator that completed the round; with the number, it identifies the round permanently.
    """

    group_rank: int
    group_world_size: int
    first_rank: int
    local_world_size: int
    world_size: int
    restarts: int
    max_restarts: int
    origin: str = ""


class WorkersStarted(AgentEvent, kw_only=True, frozen=True, tag="workers_started"):
    """The node's workers are running. `pids` are by local rank. `survived` are the local ranks of workers that continue
    in their processes from the previous round.
    """

    pids: tuple[int, ...]
    survived: tuple[int, ...] = ()


class WorkerFailed(AgentEvent, kw_only=True, frozen=True, tag="worker_failed"):
    """A worker of this node failed; the other nodes are notified."""

    failure: Failure


class RoundOver(AgentEvent, kw_only=True, frozen=True, tag="round_ended"):
    """The round has ended, but not the job.

    `reason` is one of failure, lost, departed, gave_up, drained, requested and forgotten. `node` is the readable name
    of the node that caused the end. `failure` is set if a worker failed. `held_back` is the delay of the next round in
    seconds.
    """

    reason: str
    node: str = ""
    detail: str = ""
    failure: Failure | None = None
    restarts: int = 0
    max_restarts: int = 0
    held_back: float = 0.0


class ProgressMade(AgentEvent, kw_only=True, frozen=True, tag="progress"):
    """The node's workers made progress. `step` is -1 without a number, and was reached `age` seconds ago. `source` is
    "call" (`notices.progress`) or "file" (`--progress-file`). `first_step` is this round's first reported step, -1 if
    unknown.
    """

    step: int
    age: float
    source: str
    first_step: int = -1


class OperatorActed(AgentEvent, kw_only=True, frozen=True, tag="operator"):
    by: str
    text: str


class HangReported(AgentEvent, kw_only=True, frozen=True, tag="hang"):
    """The job hangs: no rank on any node is active. `report` describes the workers, in lines."""

    report: str


class JobOver(AgentEvent, kw_only=True, frozen=True, tag="job_ended"):
    """The job ended: `outcome` is succeeded, failed or stopped."""

    outcome: str
    detail: str = ""
    failure: Failure | None = None


class AgentEnded(AgentEvent, kw_only=True, frozen=True, tag="agent_ended"):
    """The agent is about to exit. `outcome` is succeeded, failed, left (on request, and the job continues) or
    interrupted (by a signal, or the job was preempted). `seconds` is the time in each phase.
    """

    outcome: str
    detail: str = ""
    seconds: dict[NodePhase, float] = {}


class EventsLost(AgentEvent, kw_only=True, frozen=True, tag="events_lost"):
    count: int


class TorchEvent(AgentEvent, kw_only=True, frozen=True, tag="torch"):
    """An event under torch's names, as sent to every handler."""

    name: str
    source: str
    metadata: dict[str, Any]


KINDS = (
    AgentStarted
    | PhaseBegan
    | RoundStarted
    | WorkersStarted
    | WorkerFailed
    | RoundOver
    | ProgressMade
    | OperatorActed
    | HangReported
    | JobOver
    | AgentEnded
    | EventsLost
    | TorchEvent
)
"""All kinds of lines."""

encode = msgspec.json.Encoder().encode
"""Encode an event as a line, without the newline."""
