"""The phases of each node and of the whole job over time. Pure.

    running         all known nodes of the newest round have workers that run
    stopping        a node of it has seen a failure, or stops its workers for another reason
    starting        a node of it starts its workers
    held_back       no workers anywhere, and the next round is delayed after failures without progress
    rendezvous      no workers anywhere, and a node waits for a round
    down            no agent runs

Laws:

1. The spans of a node, and those of the job, follow one another without gap and without overlap.
2. A node that has lost its place, or never had one, does not say what a job is at whose round runs elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from rallypoint.observe.agent_runs import AgentRun, RoundKey
from rallypoint.telemetry.agent_events import PhaseBegan, RoundStarted
from rallypoint.telemetry.phases import NodePhase


class JobPhase(StrEnum):
    """What a job is at: the phases of its nodes, and none."""

    RUNNING = "running"
    STOPPING = "stopping"
    STARTING = "starting"
    HELD_BACK = "held_back"
    RENDEZVOUS = "rendezvous"
    DOWN = "down"


_ACTIVE = (NodePhase.STOPPING, NodePhase.STARTING, NodePhase.RUNNING)
"""Phases of nodes that hold a place in a round; the first that any node is in is the job's."""
_IDLE = (NodePhase.HELD_BACK, NodePhase.RENDEZVOUS)
"""The same of nodes that do not, where there is none of the others."""


class Span(NamedTuple):
    """A part of a node's or a job's time, in seconds since the job began; `round` is which round of the job, in order,
    -1 for none."""

    start: float
    end: float
    phase: str
    round: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.start


def node_spans(run: AgentRun, shift: float, end: float, index: Mapping[RoundKey, int]) -> Iterator[Span]:
    """The node's phases, cut where it is given a place in another round.

    Args:
        run: its agent.
        shift: when that began.
        end: when the node's time ends.
        index: which round of the job is which.
    """
    key: RoundKey | None = None
    phase, since, held = NodePhase.RENDEZVOUS, shift + run.first, 0.0

    def spans(until: float) -> Iterator[Span]:
        number = -1 if key is None else index.get(key, -1)
        until = min(until, end)
        cut = min(until, since + held) if phase is NodePhase.HELD_BACK else since
        if cut > since:
            yield Span(since, cut, NodePhase.HELD_BACK.value, number)
        if until > cut:
            rest = NodePhase.RENDEZVOUS if phase is NodePhase.HELD_BACK else phase
            yield Span(cut, until, rest.value, number)

    for event in run.events:
        at = max(since, shift + event.elapsed)
        if isinstance(event, PhaseBegan):
            yield from spans(at)
            phase, since, held = event.phase, at, event.seconds
        elif isinstance(event, RoundStarted):
            yield from spans(at)
            held = max(0.0, held - (at - since))
            key, since = run.key_of(event), at
    yield from spans(end)


def job_spans(nodes: Sequence[Sequence[Span]], wall: float) -> Iterator[Span]:
    """What the job was at from 0 to `wall`, of what its nodes were at."""
    changes = sorted(
        change
        for spans in nodes
        for span in spans
        for change in ((span.start, 1, span.round, span.phase), (span.end, -1, span.round, span.phase))
    )
    active: dict[int, Counter[str]] = defaultdict(Counter)
    idle: Counter[str] = Counter()
    since, last = 0.0, Span(0.0, 0.0, JobPhase.DOWN.value)
    for at, by, number, phase in changes:
        if at > since:
            last, done = _extended(last, Span(since, at, *_job_phase(active, idle)))
            if done is not None:
                yield done
            since = at
        counts = active[number] if phase in _ACTIVE else idle
        counts[phase] += by
        if phase in _ACTIVE and not any(counts.values()):
            del active[number]
    if wall > since:
        last, done = _extended(last, Span(since, wall, JobPhase.DOWN.value))
        if done is not None:
            yield done
    if last.seconds:
        yield last


def _job_phase(active: Mapping[int, Counter[str]], idle: Counter[str]) -> tuple[str, int]:
    if active:
        newest = max(active)
        return next(each.value for each in _ACTIVE if active[newest][each]), newest
    return next((each.value for each in _IDLE if idle[each]), JobPhase.DOWN.value), -1


def _extended(last: Span, more: Span) -> tuple[Span, Span | None]:
    """One span that grows, and the one before it once it has ended."""
    if (last.phase, last.round) == (more.phase, more.round):
        return last._replace(end=more.end), None
    return more, last if last.seconds else None
