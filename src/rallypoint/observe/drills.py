"""A drill of a job: which victim a fault has, when it is refused, and its outcome (`rallyctl drill`). Pure.

Laws:

1. The same seed chooses the same victims among the same workers and nodes, regardless of earlier outcomes.
2. A fault that would end the job is refused unless forced: one that needs a restart when none is left, or one that
   takes a node when only the minimum remains.
3. All times are differences between ages in one snapshot, on the coordinator's clock, so no two clocks are compared.
4. If an event is only known to have happened before some time, its time is shown as an upper bound. Unknown times are
   shown as unknown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from rallypoint.control.protocol.messages import Fault, NodeReport
from rallypoint.observe.status import table
from rallypoint.observe.watching.messages import EventKind, JobEvent, JobPhase, MemberState, NodeView, Snapshot

VERSION = 1
"""The version of the JSON."""
_FOUND = frozenset({EventKind.ROUND_ENDED, EventKind.NODE_LOST, EventKind.HANG_FOUND, EventKind.JOB_ENDED})
"""The events that show that a fault was noticed."""
_MAY_PASS = frozenset({Fault.PAUSE_WORKER, Fault.PAUSE_NODE, Fault.CUT})
"""The faults that end without intervention, perhaps unnoticed."""
_KILLS_NODE = frozenset({Fault.KILL_AGENT, Fault.KILL_NODE})
_TAKES_CONTROL_PLANE = _KILLS_NODE | {Fault.CUT}
_USES_RESTART = frozenset({Fault.KILL_WORKER, Fault.KILL_AGENT, Fault.HANG})
"""The faults that use up a restart. An agent's do too: other nodes' workers may fail before its loss is noticed."""


class DrillRefused(Exception):
    """A fault is refused; the message is one sentence with the reason and the remedy."""


class Drill(NamedTuple):
    """The requested faults, all of one kind.

    `rank` or `node` names the victim; otherwise the seed chooses one per fault. `lasts` is the length of a pause or cut
    in seconds. After that, the job's next step must follow `within` this many seconds.
    """

    fault: Fault
    times: int = 1
    seed: int = 0
    rank: int = -1
    node: str = ""
    lasts: float = 0.0
    within: float = 120.0
    forced: bool = False

    @property
    def limit(self) -> float:
        return self.within + (self.lasts if self.fault in _MAY_PASS else 0.0)


class Victim(NamedTuple):
    """A node, or the worker with a global rank on it. `key` is the node's name in commands."""

    node: str
    key: str
    rank: int = -1

    @property
    def text(self) -> str:
        return self.node if self.rank < 0 else f"rank {self.rank} on {self.node}"


class Begun(NamedTuple):
    """A fault after injection. `text` is its event's text; `before` is the state of the job before it."""

    drill: Drill
    number: int
    victim: Victim
    text: str
    before: Snapshot


class Trial(NamedTuple):
    """The outcome of one fault. All times are seconds since the fault; None if unknown or not reached yet.

    `step` is the first step after it or, with `seen_by` "output", the first output; an upper bound unless `is_exact`.
    `lost` is the number of repeated steps.
    """

    number: int
    fault: Fault
    victim: Victim
    survived: bool = False
    detected: float | None = None
    round: float | None = None
    step: float | None = None
    is_exact: bool = True
    seen_by: str = ""
    restarts: int = 0
    lost: int | None = None
    note: str = ""


# Victims


def choose(drill: Drill, number: int, seen: Snapshot) -> Victim:
    """Choose the victim of a fault. The first fault has number 1.

    Raises:
        DrillRefused: the fault would end the job, or no such victim exists.
    """
    why = _refusal(drill, number, seen)
    if why:
        raise DrillRefused(why)
    candidates = victims(drill, seen)
    if not candidates:
        raise DrillRefused(_no_victim_sentence(drill))
    return random.Random(f"{drill.seed}:{number}").choice(candidates)


def victims(drill: Drill, seen: Snapshot) -> list[Victim]:
    """All possible victims."""
    nodes = [node for node in seen.nodes if node.state is MemberState.PARTICIPANT and node.connected]
    nodes = [node for node in nodes if not node.succeeded]
    if drill.fault in _TAKES_CONTROL_PLANE:
        nodes = [node for node in nodes if not hosts_control_plane(node)]
    if drill.node:
        nodes = [node for node in nodes if drill.node in _names(node)]
    if not drill.fault.is_of_worker:
        return [Victim(node.name, _key(node)) for node in nodes]
    return [
        Victim(node.name, _key(node), rank)
        for node in nodes
        if node.first_rank >= 0
        for rank in range(node.first_rank, node.first_rank + node.workers)
        if drill.rank in (-1, rank)
    ]


def hosts_control_plane(node: NodeView) -> bool:
    return node.connected and node.silent_for < 0


def _key(node: NodeView) -> str:
    return f"{node.pid}@{node.host or node.address}"


def _names(node: NodeView) -> set[str]:
    return {node.name, node.host, node.address, _key(node), str(node.group_rank)}


def _no_victim_sentence(drill: Drill) -> str:
    if drill.rank >= 0:
        return f"no node of the running round has rank {drill.rank}; see 'rallyctl status'"
    which = f"{drill.node!r}" if drill.node else "any node"
    if drill.fault in _TAKES_CONTROL_PLANE:
        return (
            f"'{drill.fault.value}' cannot be caused on {which}: it is not in the job, or it hosts the control plane, "
            "which must observe the outcome; choose another node, or host the control plane elsewhere ('rallyctl "
            "serve')"
        )
    return f"'{drill.fault.value}' cannot be caused on {which}: it is not in the running round; see 'rallyctl status'"


def _refusal(drill: Drill, number: int, seen: Snapshot) -> str:
    """The reason to refuse this fault; empty if it is allowed."""
    if seen.phase is not JobPhase.RUNNING:
        return seen.detail or f"no round is running (the job is {seen.phase.value})"
    if drill.forced:
        return ""
    left = max(0, seen.max_restarts) - seen.ended_rounds.failures
    needed = drill.times - number + 1 if drill.fault is Fault.KILL_WORKER else int(drill.fault in _USES_RESTART)
    if left < needed:
        return (
            f"'{drill.fault.value}' {needed} more time{'s'[: needed != 1]} might end the job, which has {max(0, left)} "
            f"restart{'s'[: left != 1]} left; start it with a higher --max-restarts, or use --force"
        )
    there = seen.totals.in_round + seen.totals.spare + seen.totals.waiting
    if drill.fault in _KILLS_NODE and there - 1 < seen.min_nodes:
        return (
            f"'{drill.fault.value}' leaves {there - 1} node{'s'[: there != 2]}, but the job needs {seen.min_nodes}; "
            "start a spare node, or use --force if the node will be restarted"
        )
    return ""


def is_settled(seen: Snapshot) -> bool:
    """Whether all nodes of the round have reported, and those with earlier steps have made another. Otherwise the
    next fault's measurement would include the previous one.
    """
    reports = [node.report for node in seen.nodes if node.report is not None]
    there = 0 < seen.totals.in_round <= seen.totals.reported
    return there and all(report.progress >= 0 or report.step_before < 0 for report in reports)


# Outcomes


def outcome(fault_begun: Begun, seen: Snapshot) -> Trial | None:
    """The outcome of a fault according to this snapshot; None if not known yet."""
    drill, before = fault_begun.drill, fault_begun.before
    fault = next((event for event in reversed(seen.events) if _is_fault(event, fault_begun)), None)
    if fault is None:
        return None
    since = _seconds_after(fault)
    later = [event for event in seen.events if event.number > fault.number]
    detected = next((since(event.seconds_ago) for event in later if event.kind in _FOUND), None)
    started = [since(event.seconds_ago) for event in later if _starts_round(event, seen.round)]
    trial = Trial(
        fault_begun.number,
        drill.fault,
        fault_begun.victim,
        detected=detected,
        round=started[-1] if started else None,
        restarts=seen.ended_rounds.failures - before.ended_rounds.failures,
    )
    if seen.detail:
        return trial._replace(survived=seen.phase is JobPhase.SUCCEEDED, note=seen.detail)
    if seen.phase is JobPhase.RUNNING and (done := _recovered(fault_begun, seen, trial, since)) is not None:
        return done._replace(survived=True)
    if fault.seconds_ago < drill.limit:
        return None
    what = "it was not detected" if detected is None and drill.fault not in _MAY_PASS else "there was no step"
    return trial._replace(note=f"{what} within {drill.limit:g} s")


def _is_fault(event: JobEvent, begun: Begun) -> bool:
    last = begun.before.events[-1].number if begun.before.events else 0
    return event.kind is EventKind.DRILL and event.text == begun.text and event.number > last


def _starts_round(event: JobEvent, round_: int) -> bool:
    return event.kind is EventKind.ROUND_STARTED and event.round == round_


def _seconds_after(fault: JobEvent) -> Callable[[float], float]:
    return lambda seconds_ago: max(0.0, fault.seconds_ago - seconds_ago)


def _recovered(begun: Begun, seen: Snapshot, trial: Trial, since: Callable[[float], float]) -> Trial | None:
    """Add the next step to the trial; None before that step."""
    reports = [node.report for node in seen.nodes if node.report is not None]
    earlier = [node.report for node in begun.before.nodes if node.report is not None]
    if seen.round > begun.before.round:
        if trial.round is None:
            return None
        enough = min(sum(map(_has_made_steps, earlier)), seen.totals.in_round)
        progressed = [report for report in reports if report.progress >= 0]
        if progressed and len(progressed) >= enough:
            return _with_first_step(trial, reports, progressed, since)
        return None if enough else _by_output(trial, earlier, reports, trial.round, since)
    if trial.detected is None and begun.drill.fault not in _MAY_PASS:
        return None
    over = begun.drill.lasts if trial.detected is None else trial.detected
    if since(0.0) <= over or not _is_back(begun.victim, seen, over, since):
        return None
    if any(report.progress >= 0 for report in earlier):
        moments = [since(report.progress_age) for report in reports if report.progress >= 0]
        if not moments or min(moments) <= over:
            return None
        return trial._replace(step=max(moments), is_exact=False, seen_by="progress", lost=0)
    return _by_output(trial, earlier, reports, over, since)


def _has_made_steps(report: NodeReport) -> bool:
    return max(report.progress, report.step_before) >= 0


def _with_first_step(
    trial: Trial, reports: Sequence[NodeReport], progressed: Sequence[NodeReport], since: Callable[[float], float]
) -> Trial:
    """Add the first step of the next round to the trial. Workers that continue in their processes do not report
    theirs.
    """
    first = [report for report in progressed if report.first_step >= 0]
    if not first:
        return trial._replace(
            step=max(since(report.progress_age) for report in progressed), is_exact=False, seen_by="progress"
        )
    at, before = max(since(report.first_step_age) for report in first), max(report.step_before for report in reports)
    lost = None if before < 0 else max(0, before + 1 - min(report.first_step for report in first))
    return trial._replace(step=at, seen_by="progress", lost=lost)


def _by_output(
    trial: Trial,
    earlier: Sequence[NodeReport],
    reports: Sequence[NodeReport],
    over: float,
    since: Callable[[float], float],
) -> Trial | None:
    """Add the first output after this time, if any worker ever wrote output."""
    moments = [since(age) for report in reports for age in report.output_ages if age >= 0]
    after = [moment for moment in moments if moment > over]
    if after:
        return trial._replace(step=min(after), is_exact=False, seen_by="output")
    wrote = any(age >= 0 for report in earlier for age in report.output_ages)
    return None if wrote or not reports else trial


def _is_back(victim: Victim, seen: Snapshot, over: float, since: Callable[[float], float]) -> bool:
    """Whether the victim's node has sent the coordinator anything since this time."""
    for node in seen.nodes:
        if _key(node) == victim.key:
            return node.connected and (node.silent_for < 0 or since(node.silent_for) > over)
    return victim.rank >= 0


# Display


def trial_lines(trials: Sequence[Trial]) -> list[str]:
    """Format a table of trials."""
    rows: list[Sequence[str]] = [("#", "FAULT", "ON", "DETECTED", "ROUND", "STEP", "RESTARTS", "STEPS LOST", "")]
    rows += [
        (
            str(trial.number),
            trial.fault.value,
            trial.victim.text,
            _seconds(trial.detected),
            _seconds(trial.round),
            _step(trial),
            str(trial.restarts),
            "-" if trial.lost is None else str(trial.lost),
            "" if trial.survived else "not survived",
        )
        for trial in trials
    ]
    return table(rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def _step(trial: Trial) -> str:
    bound = "" if trial.is_exact or trial.step is None else "<= "
    return f"{bound}{_seconds(trial.step)}{' (output)' if trial.seen_by == 'output' else ''}"


def sentence(trials: Sequence[Trial], stopped: str = "") -> str:
    """The result in one sentence. `stopped` is the reason why other faults were not tried; empty for none."""
    parts = [f"{sum(trial.survived for trial in trials)} of {len(trials)} survived"]
    parts += [
        f"the job did not survive fault {trial.number} ({trial.victim.text}): {trial.note}"
        for trial in trials
        if not trial.survived
    ]
    timed = [trial for trial in trials if trial.survived and trial.step is not None]
    if timed:
        middle, slowest = median(trial.step or 0.0 for trial in timed), max(timed, key=lambda trial: trial.step or 0.0)
        bound = "" if all(trial.is_exact for trial in timed) else "at most "
        parts.append(f"median {bound}{_seconds(middle)}")
        parts.append(f"the slowest, {slowest.victim.text}, took {_step(slowest)}{_time_words(slowest)}")
    elif any(trial.survived and not trial.note for trial in trials):
        parts.append("the time of the next step is unknown: the workers report no progress (notices.progress)")
    known = [trial.lost for trial in trials if trial.lost is not None]
    if known:
        parts.append(f"{sum(known)} steps lost in total")
    if stopped:
        parts.append(f"no more faults were tried: {stopped}")
    return "; ".join(parts)


def _time_words(trial: Trial) -> str:
    """Break down the time after a fault that ended the round."""
    if trial.detected is None or trial.round is None or trial.step is None:
        return ""
    formed, step = trial.round - trial.detected, trial.step - trial.round
    return (
        f": {_seconds(trial.detected)} until it was detected, {_seconds(formed)} until the next round, "
        f"{_seconds(step)} until its first {'output' if trial.seen_by == 'output' else 'step'}"
    )


def drill_fields(drill: Drill, job: str, trials: Sequence[Trial], stopped: str) -> dict[str, Any]:
    """Format the result as JSON (`docs/how-to/drill.md`)."""
    return {
        "version": VERSION,
        "job": job,
        "fault": drill.fault.value.replace(" ", "_"),
        "times": drill.times,
        "seed": drill.seed,
        "survived": sum(trial.survived for trial in trials),
        "succeeded": is_passed(drill, trials),
        "trials": [
            {
                "number": trial.number,
                "node": trial.victim.node,
                "rank": None if trial.victim.rank < 0 else trial.victim.rank,
                "survived": trial.survived,
                "detected_seconds": _rounded(trial.detected),
                "round_seconds": _rounded(trial.round),
                "step_seconds": _rounded(trial.step),
                "step_is_exact": trial.is_exact and trial.step is not None,
                "seen_by": trial.seen_by or None,
                "restarts": trial.restarts,
                "steps_lost": trial.lost,
                "note": trial.note,
            }
            for trial in trials
        ],
        "stopped": stopped,
        "sentence": sentence(trials, stopped),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def is_passed(drill: Drill, trials: Sequence[Trial]) -> bool:
    """Whether the job survived all requested faults."""
    return len(trials) == drill.times and all(trial.survived for trial in trials)
