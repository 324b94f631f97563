"""Accounts for a job's time, based on events from its agents. Pure: events in, a report out.

    running         workers are running on all known nodes of the newest round
    stopping        one of its nodes saw a failure, or is stopping its workers for another reason
    starting        one of its nodes is starting its workers
    held_back       no workers anywhere, and the next round is delayed after failures without progress
    rendezvous      no workers anywhere, and a node is waiting for a round
    down            no agent is running

Laws:

1. A node, and the job, is in exactly one phase at a time: spans have no gaps or overlaps. Therefore the seconds of the
   phases add up to the wall time, and so do the productive and the lost seconds, by cause.
2. A node without a place does not determine the phase of a job whose round is running elsewhere.
3. A node uses the clock that it started with: its own `elapsed` seconds. If two nodes disagree by more than a second
   about the start of the same round, one clock is adjusted to the other.
4. Lost work is work that did not survive: from the progress at which the next round continued, up to the failure.
   Without reports of progress it is unknown, and none is counted.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from statistics import median, median_low
from typing import NamedTuple

from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import NodePhase

_MAX_SKEW = 1.0
"""Maximum difference in seconds between two clocks without adjustment."""
_FAILURES = ("failure", "lost")
"""Reasons for a round to end that count as failures."""
_LAST_RESORT = "-"

RoundKey = tuple[str, int]
"""The coordinator that completed a round, and the round's number: a name that never changes."""


# The agents


@dataclass(frozen=True)
class AgentRun:
    """One agent, from its start to its end.

    `name` is unique: the host, with the agent's process id if a host has several, and with a number if the id is the
    same too, as in a restarted pod. `began` is in epoch seconds on its own clock. `told` are its events, in order, at
    least one.
    """

    job: str
    host: str
    name: str
    began: float
    told: tuple[events.AgentEvent, ...]

    @cached_property
    def placements(self) -> dict[RoundKey, float]:
        """When it got a place in each of its rounds, in seconds since its start."""
        return {self.key_of(event): event.elapsed for event in self.told if isinstance(event, events.RoundStarted)}

    @property
    def first_elapsed(self) -> float:
        """Greater than 0 if old events were removed."""
        return 0.0 if isinstance(self.told[0], events.AgentStarted) else self.told[0].elapsed

    @property
    def last_round(self) -> RoundKey | None:
        return next(reversed(self.placements), None)

    @property
    def has_ended(self) -> bool:
        return any(isinstance(event, events.AgentEnded) for event in self.told[-3:])

    @staticmethod
    def key_of(event: events.RoundStarted) -> RoundKey:
        return event.origin, event.round

    def in_rounds(self) -> Iterator[tuple[RoundKey, events.AgentEvent]]:
        """Each event during a round in which the agent had a place, with the round."""
        keys: dict[int, RoundKey] = {}
        for event in self.told:
            if isinstance(event, events.RoundStarted):
                keys[event.round] = self.key_of(event)
            if event.round in keys:
                yield keys[event.round], event


_Key = tuple[str, str, int]
"""Job, host and process id. A later run may have the same ones."""


@dataclass
class _Open:
    began: float
    told: list[events.AgentEvent] = field(default_factory=list)


def agent_runs(lines: Iterable[events.KINDS]) -> list[AgentRun]:
    """The agents behind these events, ordered by start.

    Consecutive agents with the same host and process id are told apart by their starts.
    """
    open_runs: dict[_Key, _Open] = {}
    runs: list[tuple[_Key, _Open]] = []
    for event in lines:
        key = (event.job, event.host, event.pid)
        run = open_runs.get(key)
        if run is None or _is_later_run(event, run.told[-1]):
            run = open_runs[key] = _Open(event.time - event.elapsed)
            runs.append((key, run))
        run.told.append(event)
    runs.sort(key=lambda entry: (entry[1].began, entry[0]))
    return [
        AgentRun(key[0], key[1], name, run.began, tuple(sorted(run.told, key=lambda event: event.elapsed)))
        for (key, run), name in zip(runs, _names([key for key, _ in runs]), strict=True)
    ]


def _is_later_run(event: events.AgentEvent, last: events.AgentEvent) -> bool:
    """Whether an event after `last` starts a run, or belongs to a run whose first lines were removed."""
    began = event.time - event.elapsed
    return isinstance(event, events.AgentStarted) or (event.elapsed < last.elapsed and began > last.time)


def _names(keys: list[_Key]) -> Iterator[str]:
    hosts = Counter(host for _, host, _ in keys)
    all_keys, so_far = Counter(keys), Counter[_Key]()
    for key in keys:
        _, host, pid = key
        so_far[key] += 1
        if hosts[host] == 1:
            yield host
        else:
            yield f"{host} pid {pid}" + (f" run {so_far[key]}" if all_keys[key] > 1 else "")


# Phases over time


class JobActivity(StrEnum):
    """The phase of a job: its nodes' phases, and one for no agent."""

    RUNNING = "running"
    STOPPING = "stopping"
    STARTING = "starting"
    HELD_BACK = "held_back"
    RENDEZVOUS = "rendezvous"
    DOWN = "down"


_ACTIVE = (NodePhase.STOPPING, NodePhase.STARTING, NodePhase.RUNNING)
"""Phases of nodes with a place in a round. The job is in the first of these phases that any node is in."""
_IDLE = (NodePhase.HELD_BACK, NodePhase.RENDEZVOUS)
"""Phases of nodes without a place, used if no node has one."""


class Span(NamedTuple):
    """A part of a node's or a job's time, in seconds since the job's start; `round` is the index of the job's round,
    -1 for none.
    """

    start: float
    end: float
    phase: str
    round: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.start


def _node_spans(run: AgentRun, shift: float, end: float, rounds: Mapping[RoundKey, _Round]) -> Iterator[Span]:
    """Yield the node's phases until `end`, cut when it gets a place in another round; its agent started at `shift`."""
    key: RoundKey | None = None
    phase, since, back_off = NodePhase.RENDEZVOUS, shift + run.first_elapsed, 0.0

    def spans(until: float) -> Iterator[Span]:
        number = -1 if key is None else rounds[key].index
        until = min(until, end)
        cut = min(until, since + back_off) if phase is NodePhase.HELD_BACK else since
        if cut > since:
            yield Span(since, cut, NodePhase.HELD_BACK.value, number)
        if until > cut:
            rest = NodePhase.RENDEZVOUS if phase is NodePhase.HELD_BACK else phase
            yield Span(cut, until, rest.value, number)

    for event in run.told:
        at = max(since, shift + event.elapsed)
        if isinstance(event, events.PhaseBegan):
            yield from spans(at)
            phase, since, back_off = event.phase, at, event.seconds
        elif isinstance(event, events.RoundStarted):
            yield from spans(at)
            back_off = max(0.0, back_off - (at - since))
            key, since = run.key_of(event), at
    yield from spans(end)


def _job_spans(nodes: Sequence[Sequence[Span]], wall: float) -> Iterator[Span]:
    """Yield the job's phases from 0 to `wall`, computed from its nodes' phases."""
    changes = sorted(
        change
        for spans in nodes
        for span in spans
        for change in ((span.start, 1, span.round, span.phase), (span.end, -1, span.round, span.phase))
    )
    active: dict[int, Counter[str]] = defaultdict(Counter)
    idle: Counter[str] = Counter()
    since, last = 0.0, Span(0.0, 0.0, JobActivity.DOWN.value)
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
        last, done = _extended(last, Span(since, wall, JobActivity.DOWN.value))
        if done is not None:
            yield done
    if last.seconds:
        yield last


def _job_phase(active: Mapping[int, Counter[str]], idle: Counter[str]) -> tuple[str, int]:
    if active:
        newest = max(active)
        return next(phase.value for phase in _ACTIVE if active[newest][phase]), newest
    return next((phase.value for phase in _IDLE if idle[phase]), JobActivity.DOWN.value), -1


def _extended(last: Span, more: Span) -> tuple[Span, Span | None]:
    if (last.phase, last.round) == (more.phase, more.round):
        return last._replace(end=more.end), None
    return more, last if last.seconds else None


# Rounds


class RecoveryTime(NamedTuple):
    """The time from noticing the end of a round to the next round's workers. `parts` are the job's phases meanwhile."""

    seconds: float
    parts: Mapping[str, float]


class RoundEntry(NamedTuple):
    """One round. `ended` is None if the records stop during the round; `lost` are the seconds of its work that did not
    survive; `recovery` is None if no workers started after it.
    """

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
    recovery: RecoveryTime | None = None


class ProgressSample(NamedTuple):
    """Progress: the time, the step reached (-1 for no number), and the round's first step, if known."""

    at: float
    step: int
    first: int


@dataclass
class _Round:
    """What all agents know about one round; times are relative to the job's start. `index` is its position."""

    index: int = -1
    placed: list[tuple[float, events.RoundStarted]] = field(default_factory=list)
    ends: list[tuple[float, events.RoundOver]] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    progress: list[tuple[bool, ProgressSample]] = field(default_factory=list)
    """Each progress, and whether a file reported it."""
    samples: list[ProgressSample] = field(default_factory=list)
    """The progress that counts: only that from files, if any."""

    @property
    def begun(self) -> float:
        return min(at for at, _ in self.placed)

    @property
    def end(self) -> tuple[float, events.RoundOver] | None:
        return min(self.ends, key=lambda end: end[0], default=None)

    @property
    def end_seen(self) -> float | None:
        """When an agent first noticed that the round ended; None if it has not."""
        return min([*self.failed, *(at for at, _ in self.ends)]) if self.ends else None

    def entry(self) -> RoundEntry:
        """The part of the entry that does not need the job's timeline."""
        at, first = min(self.placed, key=lambda entry: entry[0])
        entry = RoundEntry(first.round, at, first.group_world_size, first.world_size)
        if self.end is None:
            return entry
        ended, event = self.end
        failure = event.failure
        if event.reason == "requested":  # by an operator, not a node
            return entry._replace(ended=ended, cause=event.reason, detail=f"by {event.node}")
        return entry._replace(
            ended=ended,
            cause=event.reason,
            host=failure.host if failure else event.node.partition(" ")[0],
            detail=_failure_text(failure) if failure else event.detail,
            rank=failure.rank if failure else -1,
        )


def _rounds_of(runs: Sequence[AgentRun], shifts: Mapping[str, float]) -> dict[RoundKey, _Round]:
    by_key: dict[RoundKey, _Round] = defaultdict(_Round)
    for run in runs:
        for key, event in run.in_rounds():
            at = shifts[run.name] + event.elapsed
            match event:
                case events.RoundStarted():
                    by_key[key].placed.append((at, event))
                case events.RoundOver():
                    by_key[key].ends.append((at, event))
                case events.WorkerFailed():
                    by_key[key].failed.append(at)
                case events.WorkersStarted():
                    by_key[key].started.append(at)
                case events.ProgressMade():
                    sample = ProgressSample(at - event.age, event.step, event.first_step)
                    by_key[key].progress.append((event.source == "file", sample))
                case _:
                    pass
    rounds = dict(sorted(by_key.items(), key=lambda entry: entry[1].begun))
    by_file = _by_file(rounds.values())
    for index, round_ in enumerate(rounds.values()):
        round_.index = index
        round_.samples = sorted(sample for from_file, sample in round_.progress if from_file is by_file)
    return rounds


def _by_file(rounds: Iterable[_Round]) -> bool:
    return any(from_file for round_ in rounds for from_file, _ in round_.progress)


def _failure_text(failure: events.Failure) -> str:
    return f"rank {failure.rank}, exit code {failure.exit_code}: {failure.message}"


def _with_losses(rounds: Sequence[_Round], timeline: Sequence[Span], outcome: str) -> tuple[RoundEntry, ...]:
    """Compute the rounds' losses, in a job with this `timeline` and `outcome`.

    The last round's work is not lost unless a failure ended the job.
    """
    running: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        if span.phase == JobActivity.RUNNING:
            running[span.round].append(span)
    known = any(round_.samples for round_ in rounds)
    by_file = _by_file(rounds)
    entries: list[RoundEntry] = []
    limit: int | None = None
    after: _Round | None = None
    for round_ in reversed(rounds):
        spans = running[round_.index]
        survived_until = spans[-1].end if spans else 0.0
        goes_on = after is None and outcome in ("succeeded", "unfinished")
        if known and not goes_on:
            survived_until = _kept_until(round_.samples, None if by_file else limit)
        lost = sum(span.end - min(span.end, max(span.start, survived_until)) for span in spans)
        firsts = [sample.first for sample in round_.samples if sample.first >= 0]
        limit = min(firsts if limit is None else [limit, *firsts], default=limit)
        total = sum(span.seconds for span in spans)
        entries.append(round_.entry()._replace(running=total, lost=lost, recovery=_recovery(round_, after, timeline)))
        after = round_
    entries.reverse()
    return tuple(entries)


def _kept_until(samples: Sequence[ProgressSample], limit: int | None) -> float:
    """The time until which work survived: a later round continued at step `limit`, so all steps before it did."""
    if not samples:
        return 0.0
    if limit is None or samples[-1].step < limit:
        return samples[-1].at
    reached = 0.0
    before: ProgressSample | None = None
    for sample in samples:
        if sample.step >= limit - 1:
            if before is not None and sample.step > before.step:
                part = max(0.0, (limit - 1 - before.step) / (sample.step - before.step))
                reached = before.at + part * (sample.at - before.at)
            elif sample.step == limit - 1:
                reached = sample.at
            break
        before, reached = sample, sample.at
    return reached


def _recovery(over: _Round, after: _Round | None, timeline: Sequence[Span]) -> RecoveryTime | None:
    seen = over.end_seen
    if seen is None or after is None or not after.started or (until := max(after.started)) < seen:
        return None
    parts: dict[str, float] = defaultdict(float)
    for span in timeline:
        if span.end > seen and span.start < until:
            parts[span.phase] += min(span.end, until) - max(span.start, seen)
    return RecoveryTime(until - seen, dict(parts))


# The report


class Loss(StrEnum):
    RENDEZVOUS = "rendezvous"
    RESTART = "restart"
    """Starting workers (the first time too) and stopping them."""
    LOST_WORK = "lost_work"
    HELD_BACK = "held_back"
    DOWN = "down"


_LOSS_OF = {
    JobActivity.RENDEZVOUS: Loss.RENDEZVOUS,
    JobActivity.STARTING: Loss.RESTART,
    JobActivity.STOPPING: Loss.RESTART,
    JobActivity.HELD_BACK: Loss.HELD_BACK,
    JobActivity.DOWN: Loss.DOWN,
}


class NodeEntry(NamedTuple):
    """One agent, or several consecutive agents on a host, and their phases."""

    name: str
    spans: tuple[Span, ...]
    failures: tuple[tuple[float, str], ...]
    """The times and descriptions of its workers' failures."""


@dataclass(frozen=True)
class Report:
    """The account of a job's time. All times are seconds since `began`, which is in epoch seconds."""

    job: str
    began: float
    wall: float
    phases: Mapping[JobActivity, float]
    productive: float
    lost: Mapping[Loss, float]
    rounds: tuple[RoundEntry, ...]
    nodes: tuple[NodeEntry, ...]
    timeline: tuple[Span, ...]
    outcome: str
    """succeeded, failed, stopped, or unfinished if the records do not show the outcome."""
    detail: str = ""
    final_failure: str = ""
    """The host of the failure that ended the job; empty for none."""
    notes: tuple[str, ...] = ()
    """Remarks about these numbers, one sentence each."""

    @property
    def ratio(self) -> float:
        """The effective-training-time ratio: productive time divided by wall time."""
        return self.productive / self.wall if self.wall else 0.0

    @property
    def restarts(self) -> tuple[RoundEntry, ...]:
        """The rounds that ended before the job did."""
        return tuple(entry for entry in self.rounds if entry.cause)

    @property
    def failures(self) -> int:
        """Workers' failures and lost nodes, including one that ended the job."""
        return sum(entry.cause in _FAILURES for entry in self.rounds) + bool(self.final_failure)

    @property
    def mean_time_between_failures(self) -> float | None:
        """Seconds of running time per failure; None without failures."""
        return self.phases[JobActivity.RUNNING] / self.failures if self.failures else None

    @property
    def restarts_by_cause(self) -> Mapping[str, int]:
        return dict(Counter(restart.cause for restart in self.restarts).most_common())

    @property
    def restarts_by_host(self) -> Mapping[str, int]:
        return dict(Counter(restart.host or _LAST_RESORT for restart in self.restarts).most_common())

    def slowest_recoveries(self, most: int = 5) -> tuple[RoundEntry, ...]:
        """The rounds that took longest until workers were running again."""
        recovered = [entry for entry in self.rounds if entry.recovery is not None]
        return tuple(sorted(recovered, key=lambda entry: -entry.recovery.seconds if entry.recovery else 0.0)[:most])


def report(runs: Sequence[AgentRun], notes: Iterable[str] = ()) -> Report:
    """Account for the time of a job with at least one agent; `notes` come from reading its files."""
    offsets, clock_notes = _offsets(runs)
    began = min(run.began + run.first_elapsed + offsets[run.name] for run in runs)
    shifts = {run.name: run.began + offsets[run.name] - began for run in runs}
    rounds = _rounds_of(runs, shifts)
    nodes = tuple(_nodes(runs, shifts, rounds))
    wall = max((span.end for node in nodes for span in node.spans), default=0.0)
    timeline = tuple(_job_spans([node.spans for node in nodes], wall))
    phases = dict.fromkeys(JobActivity, 0.0)
    for span in timeline:
        phases[JobActivity(span.phase)] += span.seconds
    outcome = _outcome(runs)
    entries = _with_losses([*rounds.values()], timeline, outcome.outcome if outcome else "unfinished")
    lost = dict.fromkeys(Loss, 0.0)
    for phase, loss in _LOSS_OF.items():
        lost[loss] += phases[phase]
    lost[Loss.LOST_WORK] = lost_work = sum(entry.lost for entry in entries)
    return Report(
        job=runs[0].job,
        began=began,
        wall=wall,
        phases=phases,
        productive=phases[JobActivity.RUNNING] - lost_work,
        lost=lost,
        rounds=entries,
        nodes=nodes,
        timeline=timeline,
        outcome=outcome.outcome if outcome else "unfinished",
        detail=_outcome_detail(outcome),
        final_failure=outcome.failure.host if outcome and outcome.failure else "",
        notes=(*notes, *clock_notes, *_notes(runs, [*rounds.values()])),
    )


_Rounds = Mapping[RoundKey, _Round]


def _nodes(runs: Sequence[AgentRun], shifts: Mapping[str, float], rounds: _Rounds) -> Iterator[NodeEntry]:
    for host in sorted({run.host for run in runs}, key=_natural_key):
        agents = [_node(run, shifts[run.name], rounds) for run in runs if run.host == host]
        agents.sort(key=lambda agent: agent.spans[:1])
        spans = tuple(span for agent in agents for span in agent.spans)
        if all(before.end <= after.start for before, after in itertools.pairwise(spans)):
            yield NodeEntry(host, spans, tuple(failure for agent in agents for failure in agent.failures))
        else:
            yield from agents


def _natural_key(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name))


def _node(run: AgentRun, shift: float, rounds: _Rounds) -> NodeEntry:
    failed = (event for event in run.told if isinstance(event, events.WorkerFailed))
    end = shift + run.told[-1].elapsed
    if not run.has_ended and (last := run.last_round) is not None and (over := rounds[last].end) is not None:
        end = max(end, over[0])  # it was killed; others treat it as alive until they noticed that its round ended
    return NodeEntry(
        run.name,
        tuple(_node_spans(run, shift, end, rounds)),
        tuple((shift + event.elapsed, _failure_text(event.failure)) for event in failed),
    )


# Clocks


def _offsets(runs: Sequence[AgentRun]) -> tuple[dict[str, float], list[str]]:
    """Seconds to add to each agent's times so that all agree, and sentences about wrong clocks."""
    reference = max(runs, key=lambda run: len(run.placements))
    ahead: dict[str, float] = {}
    for run in runs:
        common = run.placements.keys() & reference.placements.keys()
        if common:
            leads = (run.placements[key] + run.began - reference.placements[key] - reference.began for key in common)
            ahead[run.name] = median(leads)
    usual = median_low(ahead.values()) if ahead else 0.0
    wrong = {name: by - usual for name, by in ahead.items() if abs(by - usual) > _MAX_SKEW}
    notes = [
        f"the clock of {name} is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} the others, and was corrected"
        for name, by in wrong.items()
    ]
    return {run.name: -wrong.get(run.name, 0.0) for run in runs}, notes


# End and notes


def _outcome(runs: Sequence[AgentRun]) -> events.JobOver | None:
    endings = [
        (run.began + event.elapsed, event) for run in runs for event in run.told if isinstance(event, events.JobOver)
    ]
    return max(endings, key=lambda entry: entry[0])[1] if endings else None


def _outcome_detail(outcome: events.JobOver | None) -> str:
    if outcome is None:
        return ""
    return outcome.detail or (_failure_text(outcome.failure) if outcome.failure else "")


def _notes(runs: Sequence[AgentRun], rounds: Sequence[_Round]) -> Iterator[str]:
    if not any(round_.samples for round_ in rounds):
        yield (
            "no progress was reported (notices.progress or --progress-file), so lost work is unknown, and all running "
            "time counts as productive"
        )
    for round_ in rounds:
        here, all_of_it = len(round_.placed), max(event.group_world_size for _, event in round_.placed)
        if here < all_of_it:
            yield (
                f"for round {round_.placed[0][1].round}, only {here} of {all_of_it} nodes have events here; pass the "
                "files of all nodes to see the whole job"
            )
            break
    lost = sum(event.count for run in runs for event in run.told if isinstance(event, events.EventsLost))
    if lost:
        yield f"{lost} events could not be written when they happened, and are missing"
    open_ends = [run.name for run in runs if not run.has_ended]
    if open_ends:
        names = ", ".join(open_ends[:4]) + (f" and {len(open_ends) - 4} more" if len(open_ends) > 4 else "")
        over = any(isinstance(event, events.JobOver) for run in runs for event in run.told)
        yield f"the events of {names} have no final event: {'killed' if over else 'killed, or still running'}"
