"""What one agent tells of its part in a job, one event a line of JSON (`docs/reference/events.md`), and the phases of
its node, which follow one another without gap, so that they add up. Pure.

Laws:

1. Every line says by itself whose it is: job, host, agent. Lines of many agents may stand in one file.
2. Moments are seconds since the agent began (`elapsed`), which no change of the clock disturbs; `time` is for people
   and to put agents beside one another.
3. A field is added, never given another meaning; a reader skips kinds and fields that it does not know.
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
    """Who an event is about."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # noqa: UP042 - as above
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


VERSION = 1


class NodePhase(StrEnum):
    RENDEZVOUS = "rendezvous"
    """It waits for a place in a round."""
    HELD_BACK = "held_back"
    """The same, while the next round is delayed after failures without progress."""
    STARTING = "starting"
    """It has a place, and its workers are being started."""
    RUNNING = "running"
    STOPPING = "stopping"
    """A failure was seen, or the workers are being stopped for another reason."""


class PhaseClock:
    """Counts the seconds that a node spends in each phase. They add up to the time since it began, at `now`."""

    def __init__(self, now: float) -> None:
        self.phase = NodePhase.RENDEZVOUS
        self._since = now
        self._held_until = now
        self._seconds = dict.fromkeys(NodePhase, 0.0)

    def enter(self, phase: NodePhase, now: float, held_back: float = 0.0) -> None:
        """Another phase begins; of HELD_BACK, `held_back` seconds count as that and the rest as RENDEZVOUS."""
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
    """What all lines have.

    `time` is in epoch seconds, `elapsed` in seconds since the agent began. `pid` is the agent's. `round` is the round
    that the node holds or held a place in last, -1 before the first.
    """

    version: int = VERSION
    time: float
    elapsed: float
    job: str
    host: str
    pid: int
    round: int = -1


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """A worker's failure. `exit_code` is -N for a death by signal N; `message` is one line."""

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
    """The node has come into another phase. `seconds` is for how long a round is held back, where it is."""

    phase: NodePhase
    seconds: float = 0.0


class RoundStarted(AgentEvent, kw_only=True, frozen=True, tag="round_started"):
    """The node has been given a place in a round. Its workers have the global ranks from `first_rank` on.

    `origin` names the coordinator that has completed the round: with the number it names the round for good.
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
    """The workers of the node run. `pids` are by local rank. `survived` are the local ranks of those that were in the
    round before, and continue in their processes."""

    pids: tuple[int, ...]
    survived: tuple[int, ...] = ()


class WorkerFailed(AgentEvent, kw_only=True, frozen=True, tag="worker_failed"):
    """A worker of this node has failed, and the others are told."""

    failure: Failure


class RoundOver(AgentEvent, kw_only=True, frozen=True, tag="round_ended"):
    """The round is over, but not the job.

    `reason` is one of failure, lost, departed, gave_up, drained, requested and forgotten; `node` is whose doing it was,
    as people call it; `failure` is there where a worker had failed. `held_back` is for how many seconds the next round
    is delayed.
    """

    reason: str
    node: str = ""
    detail: str = ""
    failure: Failure | None = None
    restarts: int = 0
    max_restarts: int = 0
    held_back: float = 0.0


class ProgressMade(AgentEvent, kw_only=True, frozen=True, tag="progress"):
    """The workers of the node have come further. `step` is -1 where there is no number, `age` how many seconds ago it
    was reached, `source` is "call" (`notices.progress`) or "file" (`--progress-file`). `first_step` is the first step
    that was told in this round, -1 where that is not known."""

    step: int
    age: float
    source: str
    first_step: int = -1


class OperatorActed(AgentEvent, kw_only=True, frozen=True, tag="operator"):
    by: str
    text: str


class HangReported(AgentEvent, kw_only=True, frozen=True, tag="hang"):
    """The job hangs: no rank of any node gives a sign of life. `report` is what the workers are doing, in lines."""

    report: str


class JobOver(AgentEvent, kw_only=True, frozen=True, tag="job_ended"):
    """The job is over: `outcome` is succeeded, failed or stopped."""

    outcome: str
    detail: str = ""
    failure: Failure | None = None


class AgentEnded(AgentEvent, kw_only=True, frozen=True, tag="agent_ended"):
    """The agent is about to exit: `outcome` is succeeded, failed, left (it was asked to, and the job continues) or
    interrupted (by a signal, or the job was preempted). `seconds` is how long the node was in each phase."""

    outcome: str
    detail: str = ""
    seconds: dict[NodePhase, float] = {}


class EventsLost(AgentEvent, kw_only=True, frozen=True, tag="events_lost"):
    count: int


class TorchEvent(AgentEvent, kw_only=True, frozen=True, tag="torch"):
    """An event under torch's names, as every handler is given it."""

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
"""The line of an event, as bytes without its newline."""
