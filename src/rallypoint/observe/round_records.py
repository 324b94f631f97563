"""Records of each round from all agents: how it ended, what of its work survived, how long the recovery took. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rallypoint.observe.agent_runs import AgentRun, RoundKey
from rallypoint.observe.timelines import JobPhase, Span
from rallypoint.telemetry import agent_events as events


class Recovery(NamedTuple):
    """The time from when the end of a round was seen to the workers of the next one; `parts` says what the job was at
    in it."""

    seconds: float
    parts: Mapping[str, float]


class RoundEntry(NamedTuple):
    """One round. `ended` is None for the one in which the records end; `lost` are the seconds of work that did not
    survive it; `recovery` is None if no workers were started after it."""

    number: int
    started: float
    nodes: int
    world_size: int
    ended: float | None = None
    cause: str = ""
    host: str = ""
    detail: str = ""
    rank: int = -1
    running: float = 0.0
    lost: float = 0.0
    recovery: Recovery | None = None


class Sample(NamedTuple):
    """Progress: when which step was reached (-1 for no number), and the first step of its round, if that is known."""

    at: float
    step: int
    first: int


class RoundRecords:
    """The records of all agents for each round, with moments since the job began."""

    def __init__(self, runs: Sequence[AgentRun], shifts: Mapping[str, float]) -> None:
        placed: dict[RoundKey, list[tuple[float, events.RoundStarted]]] = defaultdict(list)
        ended: dict[RoundKey, list[tuple[float, events.RoundOver]]] = defaultdict(list)
        seen: dict[RoundKey, list[float]] = defaultdict(list)
        started: dict[RoundKey, list[float]] = defaultdict(list)
        progress: dict[RoundKey, list[tuple[bool, Sample]]] = defaultdict(list)
        for run in runs:
            shift = shifts[run.name]
            for key, event in run.in_rounds():
                at = shift + event.elapsed
                match event:
                    case events.RoundStarted():
                        placed[key].append((at, event))
                    case events.RoundOver():
                        ended[key].append((at, event))
                        seen[key].append(at)
                    case events.WorkerFailed():
                        seen[key].append(at)
                    case events.WorkersStarted():
                        started[key].append(at)
                    case events.ProgressMade():
                        sample = Sample(at - event.age, event.step, event.first_step)
                        progress[key].append((event.source == "file", sample))
                    case _:
                        pass
        keys = sorted(placed, key=lambda key: min(at for at, _ in placed[key]))
        self.index = {key: index for index, key in enumerate(keys)}
        self.order = range(len(keys))
        self.placed = [placed[key] for key in keys]
        self.ended = [min(ended[key], key=lambda each: each[0]) if key in ended else None for key in keys]
        self.seen = [min(seen[key]) if key in ended else None for key in keys]
        self.started = [max(started[key]) if key in started else None for key in keys]
        files = any(from_file for found in progress.values() for from_file, _ in found)
        self.samples = [sorted(each for from_file, each in progress[key] if from_file is files) for key in keys]
        self.from_file = files
        self.tell_progress = any(self.samples)

    def end_of(self, run: AgentRun, shift: float) -> float:
        """When the agent ended; one that was killed runs, for others, until they saw the end of its round."""
        last = shift + run.events[-1].elapsed
        if run.ended or run.last_round is None:
            return last
        over = self.ended[self.index[run.last_round]]
        return last if over is None else max(last, over[0])

    def entry(self, index: int) -> RoundEntry:
        """What is known without the job's timeline."""
        at, first = min(self.placed[index], key=lambda each: each[0])
        entry = RoundEntry(first.round, at, first.group_world_size, first.world_size)
        over = self.ended[index]
        if over is None:
            return entry
        ended, event = over
        failure = event.failure
        if event.reason == "requested":  # by a person and not by a node
            return entry._replace(ended=ended, cause=event.reason, detail=f"by {event.node}")
        return entry._replace(
            ended=ended,
            cause=event.reason,
            host=failure.host if failure else event.node.partition(" ")[0],
            detail=failure_text(failure) if failure else event.detail,
            rank=failure.rank if failure else -1,
        )


def failure_text(failure: events.Failure) -> str:
    return f"rank {failure.rank}, exit code {failure.exit_code}: {failure.message}"


def with_losses(rounds: RoundRecords, timeline: Sequence[Span], outcome: str) -> tuple[RoundEntry, ...]:
    """The rounds with what was lost in each.

    Args:
        rounds: what is told of them.
        timeline: what the job was at.
        outcome: how it ended. What ran last in a job that has not ended by a failure is not lost.
    """
    running: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        if span.phase == JobPhase.RUNNING:
            running[span.round].append(span)
    entries: list[RoundEntry] = []
    limit: int | None = None
    for index in reversed(rounds.order):
        entry, spans = rounds.entry(index), running[index]
        kept = spans[-1].end if spans else 0.0
        goes_on = index == rounds.order[-1] and outcome in ("succeeded", "unfinished")
        if rounds.tell_progress and not goes_on:
            kept = _kept_until(rounds.samples[index], limit if not rounds.from_file else None)
        lost = sum(span.end - min(span.end, max(span.start, kept)) for span in spans)
        firsts = [each.first for each in rounds.samples[index] if each.first >= 0]
        limit = min(firsts if limit is None else [limit, *firsts], default=limit)
        total = sum(span.seconds for span in spans)
        entries.append(entry._replace(running=total, lost=lost, recovery=_recovery(rounds, timeline, index)))
    entries.reverse()
    return tuple(entries)


def _kept_until(samples: Sequence[Sample], limit: int | None) -> float:
    """When the work was done that survived: all before step `limit`, with which a later round went on."""
    if not samples:
        return 0.0
    if limit is None or samples[-1].step < limit:
        return samples[-1].at
    reached = 0.0
    before: Sample | None = None
    for each in samples:
        if each.step >= limit - 1:
            if before is not None and each.step > before.step:
                part = max(0.0, (limit - 1 - before.step) / (each.step - before.step))
                reached = before.at + part * (each.at - before.at)
            elif each.step == limit - 1:
                reached = each.at
            break
        before, reached = each, each.at
    return reached


def _recovery(rounds: RoundRecords, timeline: Sequence[Span], index: int) -> Recovery | None:
    seen = rounds.seen[index]
    after = rounds.started[index + 1] if index + 1 < len(rounds.order) else None
    if seen is None or after is None or after < seen:
        return None
    parts: dict[str, float] = defaultdict(float)
    for span in timeline:
        if span.end > seen and span.start < after:
            parts[span.phase] += min(span.end, after) - max(span.start, seen)
    return Recovery(after - seen, dict(parts))
