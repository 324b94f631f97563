"""Accounts for a job's time, from the events of its agents. Pure: events in, a report out.

Laws:

1. At each moment the job is in one phase (`timelines`), so the seconds of the phases add up to the wall time; and what
   was productive and what was lost, by cause, adds up to it too.
2. A node counts by the clock that it began with: its own `elapsed` seconds. Where two nodes disagree by more than a
   second about when they were given the same round, the clock of one is set by that of the other.
3. What ran and did not survive is lost work: from the last progress that the round after it went on from, up to the
   failure. Where nobody tells of progress, that cannot be known, and none is counted.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, median_low
from typing import NamedTuple

from rallypoint.observe.agent_runs import AgentRun
from rallypoint.observe.round_records import RoundEntry, RoundRecords, failure_text, with_losses
from rallypoint.observe.timelines import JobPhase, Span, job_spans, node_spans
from rallypoint.telemetry import agent_events as events

_MAX_SKEW = 1.0
"""Seconds by which two clocks may differ without being set."""
_FAILURES = ("failure", "lost")
"""Reasons for the end of a round that count as failures."""
_LAST_RESORT = "-"


class Loss(StrEnum):
    """The causes of lost time."""

    RENDEZVOUS = "rendezvous"
    RESTART = "restart"
    """Starting and stopping workers, the first start among it."""
    LOST_WORK = "lost_work"
    HELD_BACK = "held_back"
    DOWN = "down"


_LOSS_OF = {
    JobPhase.RENDEZVOUS: Loss.RENDEZVOUS,
    JobPhase.STARTING: Loss.RESTART,
    JobPhase.STOPPING: Loss.RESTART,
    JobPhase.HELD_BACK: Loss.HELD_BACK,
    JobPhase.DOWN: Loss.DOWN,
}


class NodeEntry(NamedTuple):
    """One agent, or several of one host one after the other, and what they were at."""

    name: str
    spans: tuple[Span, ...]
    failures: tuple[tuple[float, str], ...]
    """When workers of it failed, and how."""


@dataclass(frozen=True)
class Report:
    """The account of a job's time. All times are in seconds; moments count from `began`, in epoch seconds."""

    job: str
    began: float
    wall: float
    phases: Mapping[JobPhase, float]
    productive: float
    lost: Mapping[Loss, float]
    rounds: tuple[RoundEntry, ...]
    nodes: tuple[NodeEntry, ...]
    timeline: tuple[Span, ...]
    outcome: str
    """succeeded, failed, stopped, or unfinished where the records do not tell."""
    detail: str = ""
    final_failure: str = ""
    """The host of the failure that ended the job; empty if none did."""
    notes: tuple[str, ...] = ()
    """What a reader has to know of these numbers, a sentence each."""

    @property
    def ratio(self) -> float:
        """The effective-training-time ratio: productive time by wall time."""
        return self.productive / self.wall if self.wall else 0.0

    @property
    def restarts(self) -> tuple[RoundEntry, ...]:
        """The rounds that have ended before the job did."""
        return tuple(each for each in self.rounds if each.cause)

    @property
    def failures(self) -> int:
        """Failures of workers and losses of nodes, the one that ended the job among them."""
        return sum(each.cause in _FAILURES for each in self.rounds) + bool(self.final_failure)

    @property
    def mean_time_between_failures(self) -> float | None:
        """Seconds of running by failures; None without any."""
        return self.phases[JobPhase.RUNNING] / self.failures if self.failures else None

    @property
    def restarts_by_cause(self) -> Mapping[str, int]:
        """How many rounds ended so."""
        return dict(Counter(each.cause for each in self.restarts).most_common())

    @property
    def restarts_by_host(self) -> Mapping[str, int]:
        """How many rounds ended by the doing of this host."""
        return dict(Counter(each.host or _LAST_RESORT for each in self.restarts).most_common())

    def slowest_recoveries(self, most: int = 5) -> tuple[RoundEntry, ...]:
        """The rounds after which it took the longest until workers ran again."""
        found = [each for each in self.rounds if each.recovery is not None]
        return tuple(sorted(found, key=lambda each: -each.recovery.seconds if each.recovery else 0.0)[:most])


def report(runs: Sequence[AgentRun], notes: Iterable[str] = ()) -> Report:
    """Account for the time of the job with these agents.

    Args:
        runs: the agents of one job, at least one.
        notes: remarks of the reader of the files.
    """
    offsets, said = _offsets(runs)
    began = min(each.began + each.first + offsets[each.name] for each in runs)
    shifts = {each.name: each.began + offsets[each.name] - began for each in runs}
    rounds = RoundRecords(runs, shifts)
    nodes = tuple(_nodes(runs, shifts, rounds))
    wall = max((span.end for node in nodes for span in node.spans), default=0.0)
    timeline = tuple(job_spans([node.spans for node in nodes], wall))
    phases = dict.fromkeys(JobPhase, 0.0)
    for span in timeline:
        phases[JobPhase(span.phase)] += span.seconds
    outcome = _outcome(runs)
    entries = with_losses(rounds, timeline, outcome.outcome if outcome else "unfinished")
    lost = dict.fromkeys(Loss, 0.0)
    for phase, loss in _LOSS_OF.items():
        lost[loss] += phases[phase]
    lost[Loss.LOST_WORK] = lost_work = sum(each.lost for each in entries)
    return Report(
        job=runs[0].job,
        began=began,
        wall=wall,
        phases=phases,
        productive=phases[JobPhase.RUNNING] - lost_work,
        lost=lost,
        rounds=entries,
        nodes=nodes,
        timeline=timeline,
        outcome=outcome.outcome if outcome else "unfinished",
        detail=_outcome_detail(outcome),
        final_failure=outcome.failure.host if outcome and outcome.failure else "",
        notes=(*notes, *said, *_notes(runs, rounds)),
    )


def _nodes(runs: Sequence[AgentRun], shifts: Mapping[str, float], rounds: RoundRecords) -> Iterator[NodeEntry]:
    for host in sorted({each.host for each in runs}, key=_natural):
        agents = [_node(each, shifts[each.name], rounds) for each in runs if each.host == host]
        agents.sort(key=lambda each: each.spans[:1])
        spans = tuple(span for each in agents for span in each.spans)
        if all(before.end <= after.start for before, after in itertools.pairwise(spans)):
            yield NodeEntry(host, spans, tuple(failure for each in agents for failure in each.failures))
        else:
            yield from agents


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key by which n2 comes before n10."""
    return tuple((int(each), "") if each.isdecimal() else (-1, each) for each in re.split(r"([0-9]+)", name))


def _node(run: AgentRun, shift: float, rounds: RoundRecords) -> NodeEntry:
    failed = (each for each in run.events if isinstance(each, events.WorkerFailed))
    return NodeEntry(
        run.name,
        tuple(node_spans(run, shift, rounds.end_of(run, shift), rounds.index)),
        tuple((shift + each.elapsed, failure_text(each.failure)) for each in failed),
    )


# Clocks


def _offsets(runs: Sequence[AgentRun]) -> tuple[dict[str, float], list[str]]:
    """What to add to the moments of each agent, so that all agree; and sentences about those whose clock is off."""
    reference = max(runs, key=lambda each: len(each.placed))
    ahead: dict[str, float] = {}
    for each in runs:
        common = each.placed.keys() & reference.placed.keys()
        if common:
            found = (each.placed[key] + each.began - reference.placed[key] - reference.began for key in common)
            ahead[each.name] = median(found)
    usual = median_low(ahead.values()) if ahead else 0.0
    wrong = {name: by - usual for name, by in ahead.items() if abs(by - usual) > _MAX_SKEW}
    notes = [
        f"the clock of {name} is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} the others, and was set"
        for name, by in wrong.items()
    ]
    return {each.name: -wrong.get(each.name, 0.0) for each in runs}, notes


# The end, and what is to be said


def _outcome(runs: Sequence[AgentRun]) -> events.JobOver | None:
    found = [
        (run.began + each.elapsed, each) for run in runs for each in run.events if isinstance(each, events.JobOver)
    ]
    return max(found, key=lambda entry: entry[0])[1] if found else None


def _outcome_detail(outcome: events.JobOver | None) -> str:
    if outcome is None:
        return ""
    return outcome.detail or (failure_text(outcome.failure) if outcome.failure else "")


def _notes(runs: Sequence[AgentRun], rounds: RoundRecords) -> Iterator[str]:
    if not rounds.tell_progress:
        yield (
            "no progress was reported (notices.progress or --progress-file), so lost work is not known, and all "
            "that ran counts as productive"
        )
    for index in rounds.order:
        placed = rounds.placed[index]
        here, all_of_it = len(placed), max(each.group_world_size for _, each in placed)
        if here < all_of_it:
            yield (
                f"of round {placed[0][1].round} only {here} of {all_of_it} nodes have left events here; give the files "
                "of all for the whole job"
            )
            break
    lost = sum(each.count for run in runs for each in run.events if isinstance(each, events.EventsLost))
    if lost:
        yield f"{lost} events could not be written when they happened, and are missing"
    open_ends = [each.name for each in runs if not each.ended]
    if open_ends:
        names = ", ".join(open_ends[:4]) + (f" and {len(open_ends) - 4} more" if len(open_ends) > 4 else "")
        over = any(isinstance(each, events.JobOver) for run in runs for each in run.events)
        yield f"the events of {names} end without a last word: {'killed' if over else 'killed, or still running'}"
