"""The state of a job for display: text lines, one line per change, or JSON. Pure: the caller passes the time of day and
the size of the terminal.

A redrawn screen shows times of day instead of durations, so that it stays correct while nothing changes. The JSON is
that of `rallyctl status --json` and `/status.json`. Within a version, fields may be added, but are never renamed or
removed; `docs/reference/status.md` describes each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from unicodedata import combining, east_asian_width

import msgspec

from rallypoint.base.log import ranges
from rallypoint.base.signals import signal_name
from rallypoint.control.membership.state import join_names
from rallypoint.control.protocol.messages import MissingNode, NodeReport
from rallypoint.observe.watching.messages import (
    FailureView,
    JobEvent,
    JobList,
    JobPhase,
    JobSummary,
    MemberState,
    NodeView,
    Snapshot,
    Totals,
)

VERSION = 1
"""The version of the JSON format."""
_LEAST_WIDTH = 40
_EVENTS, _FAILURES = 8, 5
"""How many of the newest events and failures to show."""
_LOW = 30
"""Screens with fewer lines show fewer events and failures."""
_LEAST_NODES = 3
"""Minimum number of nodes' rows on any screen."""
_TRACEBACK = 12
"""How many lines to show of the last traceback: its last ones."""
_WORKER_LINES = 8
"""Maximum number of lines about ended or waiting workers."""
_STRAGGLERS = 10
"""Maximum number of ranks behind the others to show: those furthest behind."""
_USUAL_LAG = 1
"""A rank up to this many steps behind is not shown, since some always are."""
NODE_STATES = (*(state.value for state in MemberState), "unreachable", "succeeded")
"""The states from `node_state`. `Totals` counts each."""
_FORMING = frozenset({JobPhase.WAITING, JobPhase.FORMING, JobPhase.HELD_BACK})


def duration(seconds: float) -> str:
    """`3.2s`, `41s`, `5m12s`, `2h03m`, `3d04h`."""
    whole = int(seconds)
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


class Line(NamedTuple):
    """A line, and its style on a screen, if any."""

    text: str
    style: str = ""


class OnScreen(NamedTuple):
    """The size of a screen, and the snapshot's time of day in seconds since 1970."""

    width: int
    height: int
    now: float

    @property
    def is_low(self) -> bool:
        return self.height < _LOW


def status_lines(snapshot: Snapshot, width: int = 120) -> list[str]:
    return [cut(line.text, max(width, _LEAST_WIDTH)) for line in drawing(snapshot)]


def drawing(snapshot: Snapshot, screen: OnScreen | None = None) -> list[Line]:
    """Draw the state of a job; on a screen, as much as fits."""
    low = screen is not None and screen.is_low
    head = [*_head(snapshot, screen), Line("")]
    below = [
        *_titled("workers", _worker_lines(snapshot, screen)[: 3 if low else _WORKER_LINES]),
        *([] if low else _straggler_lines(snapshot)),
        *_titled("last failures", _failure_lines(snapshot, screen)[-1 if low else -_FAILURES :]),
        *([] if low else _traceback_lines(snapshot)),
    ]
    events = _event_lines(snapshot, screen)[-3 if low else -_EVENTS :]
    if screen is not None:  # show fewer events before omitting nodes with problems
        rows = min(len(snapshot.nodes), max(_LEAST_NODES, sum(not _is_well(node) for node in snapshot.nodes)))
        too_many = len(head) + rows + 2 + len(below) + len(_titled("", events)) - screen.height
        del events[: max(0, min(too_many, len(events) - (1 if low else 3)))]
    below += _titled("last events", events)
    return [*head, *_node_lines(snapshot, screen, len(head) + len(below)), *below]


def _is_well(node: NodeView) -> bool:
    return node.state is MemberState.PARTICIPANT and node.connected


def _titled(title: str, lines: list[Line]) -> list[Line]:
    return [Line(""), Line(title, "bold"), *lines] if lines else []


def _time_text(seconds_ago: float, screen: OnScreen | None) -> str:
    return f"{duration(seconds_ago)} ago" if screen is None else clock_time(screen.now - seconds_ago)


def cut(text: str, width: int) -> str:
    if cells(text) <= width:
        return text
    while text and cells(text) >= width:
        text = text[: -max(1, (cells(text) - width) // 2)]
    return f"{text}…"


def job_lines(jobs: JobList, *, with_ended: bool) -> list[str]:
    """List the jobs of a control plane, and its ended jobs or their number."""
    rows = [("JOB", "PHASE", "AGE", "NODES", "RESTARTS")]
    for job in jobs.jobs:
        nodes = f"{job.nodes} of {job.max_nodes}"
        rows.append((job.job, job.phase.value, duration(job.age), nodes, str(job.restarts)))
    lines = table(rows) if jobs.jobs else ["no jobs"]
    if jobs.ended and not with_ended:
        return [*lines, f"{len(jobs.ended)} ended job{'' if len(jobs.ended) == 1 else 's'} not shown; use --all"]
    return [*lines, *ended_lines(jobs.ended)]


def ended_lines(jobs: Sequence[JobSummary]) -> list[str]:
    """List the ended jobs of a control plane, below the running ones."""
    if not jobs:
        return []
    rows = [("JOB", "OUTCOME", "ENDED", "TOOK", "RESTARTS", "WHY")]
    for job in jobs:
        times = (f"{duration(job.phase_for)} ago", duration(job.age))
        rows.append((job.job, job.phase.value, *times, str(job.restarts), job.detail))
    return ["", "ended", *table(rows)]


def job_words(snapshot: Snapshot) -> str:
    """Describe a job in a few words: its phase, nodes and progress."""
    nodes, step = snapshot.totals.in_round, snapshot.totals.most_step
    progress = f", step {step}" if step >= 0 else ""
    return f"{snapshot.phase.value}, {nodes} node{'' if nodes == 1 else 's'}{progress}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell + " " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def cells(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1 for character in text)


def phase_sentence(snapshot: Snapshot, screen: OnScreen | None = None) -> str:
    since = (
        f"for {duration(snapshot.phase_for)}" if screen is None else f"since {_time_text(snapshot.phase_for, screen)}"
    )
    participants = snapshot.totals.in_round
    match snapshot.phase:
        case JobPhase.WAITING:
            who = f" ({', '.join(snapshot.expected)})" if snapshot.expected else ""
            joined = snapshot.min_nodes - snapshot.missing
            whole = " in whole segments" if joined < participants else ""
            gone = "".join(f"; {_removed_words(node, screen)}" for node in snapshot.removed)
            nodes = f"{joined} of {snapshot.min_nodes} nodes{whole}, {snapshot.missing} missing{who}"
            return f"waiting {since}: {nodes}{gone}"
        case JobPhase.FORMING:
            return f"forming {since}: {participants} of at most {snapshot.max_nodes} nodes"
        case JobPhase.HELD_BACK:
            next_at = (
                f"in {duration(snapshot.backoff)}" if screen is None else f"at {_time_text(-snapshot.backoff, screen)}"
            )
            return f"held back {since}: next round {next_at}"
        case JobPhase.RUNNING:
            return f"running {since}"
        case _:
            when = f"{_time_text(snapshot.phase_for, screen)}, after {duration(snapshot.age)}"
            return f"{snapshot.phase.value} {when}: {snapshot.detail}"


def _removed_words(node: MissingNode, screen: OnScreen | None) -> str:
    ended = ", all its ranks exited with code 0" if node.ended_with_0 else ""
    return f"{node.name}: {node.reason.value} {_time_text(node.seconds_ago, screen)}{ended}"


def restarts_sentence(snapshot: Snapshot) -> str:
    """The number of ended rounds by cause, and of restarts left."""
    ended = snapshot.ended_rounds
    causes = (
        (ended.failures, "failure", "failures"),
        (ended.lost, "node lost", "nodes lost"),
        (ended.departed, "departure", "departures"),
        (ended.drained, "membership change", "membership changes"),
        (ended.requested, "operator command", "operator commands"),
    )
    used = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in causes if count) or "none"
    left = "" if snapshot.max_restarts < 0 else f"; {max(0, snapshot.max_restarts - ended.failures)} left"
    return f"{used}{left}"


def size_words(snapshot: Snapshot) -> str:
    """`min 2, max 4`. If an operator changes this, the running round may be smaller or larger."""
    size = f"min {snapshot.min_nodes}, max {snapshot.max_nodes}"
    fits = snapshot.min_nodes <= snapshot.totals.in_round <= snapshot.max_nodes
    return size if fits or snapshot.phase is not JobPhase.RUNNING else f"next round: {size}"


def age_words(snapshot: Snapshot, screen: OnScreen | None = None) -> str:
    return duration(snapshot.age) if screen is None else f"since {_time_text(snapshot.age, screen)}"


def rank_range(node: NodeView) -> str:
    """`4-7`, the global ranks of a node's workers; `-` for none."""
    if node.first_rank < 0 or not node.workers:
        return "-"
    last = node.first_rank + node.workers - 1
    return str(last) if last == node.first_rank else f"{node.first_rank}-{last}"


def standby_workers(snapshot: Snapshot) -> tuple[int, int]:
    """The number of ready standby workers, and of all, on the shown nodes."""
    reports = [node.report for node in snapshot.nodes if node.report is not None]
    return sum(report.standby_ready for report in reports), sum(len(report.standby) for report in reports)


def node_state(node: NodeView) -> str:
    """A node's role in the job, in a word or two."""
    if node.state is MemberState.PARTICIPANT and not node.connected:
        return "unreachable"
    return "succeeded" if node.succeeded else node.state.value


def state_words(node: NodeView) -> str:
    """Like `node_state`, with the operator who drains the node, and what the node waits for."""
    drained = f", drained by {node.drained_by}" if node.drained_by else ""
    return node_state(node) + drained + (f", waits: {node.waits_for}" if node.waits_for else "")


_STYLES = {
    JobPhase.WAITING: "yellow",
    JobPhase.FORMING: "yellow",
    JobPhase.HELD_BACK: "yellow",
    JobPhase.RUNNING: "green",
    JobPhase.SUCCEEDED: "success",
    JobPhase.FAILED: "failure",
    JobPhase.STOPPED: "failure",
}
_BLOCKED = 1.0
"""Seconds until a blocked console is shown."""
_NODE_STYLES = {"unreachable": "red", "expected": "yellow", "waiting": "yellow", "spare": "dim", "succeeded": "green"}


def _head(snapshot: Snapshot, screen: OnScreen | None) -> Iterator[Line]:
    yield Line(f"job       {snapshot.job}", "bold")
    yield Line(f"phase     {phase_sentence(snapshot, screen)}", _STYLES[snapshot.phase])
    totals = snapshot.totals
    kinds = [("waiting", totals.waiting), ("spare", totals.spare)]
    if snapshot.not_shown:  # in a small job, the rows show these
        kinds = [("unreachable", totals.unreachable), ("succeeded", totals.succeeded), *kinds]
        kinds += [("expected", totals.expected), ("quiet", totals.quiet)]
    extra = "".join(f", {count} {what}" for what, count in kinds if count)
    yield Line(f"round     {snapshot.round}")
    if not snapshot.detail or totals.in_round:
        yield Line(f"nodes     {totals.in_round} ({size_words(snapshot)}){extra}")
    yield Line(f"restarts  {restarts_sentence(snapshot)}")
    ready, standby = standby_workers(snapshot)
    if standby:
        yield Line(f"standby   {ready} of {standby} workers ready")
    if not snapshot.detail:
        yield Line(f"age       {age_words(snapshot, screen)}")
    if snapshot.endpoint:
        yield Line(f"endpoint  {snapshot.endpoint}")
    if totals.command:
        yield Line(f"command   {totals.command}")
    if totals.log_folder:
        yield Line(f"logs      {totals.log_folder}{' on the node of rank 0' if totals.in_round > 1 else ''}")
    last = snapshot.failures[-1] if snapshot.failures else None
    if snapshot.phase is JobPhase.FAILED and last is not None and last.rank >= 0:
        yield Line(
            f"report    on {last.host or last.node}, with the last lines of its ranks: rallyctl status {snapshot.job}"
        )
    if totals.in_place_of:
        yield Line(f"launcher  rallyrun, in place of {' and '.join(totals.in_place_of)} (rallyctl shim)")
    least, most = totals.least_step, totals.most_step
    if most >= 0:
        some = snapshot.not_shown and totals.reported < totals.in_round
        of = f", on {totals.reported} nodes that reported" if some else ""
        yield Line(f"progress  step {least}{f' to {most}' if most != least else ''}{of}")


def _node_lines(snapshot: Snapshot, screen: OnScreen | None, others: int) -> list[Line]:
    """The table of the nodes, on a screen with `others` more lines."""
    if not snapshot.nodes:  # a control plane drops the nodes of an ended job
        return [] if snapshot.detail else [Line("no node has joined yet")]
    nodes = list(snapshot.nodes)
    if screen is not None:
        room = max(_LEAST_NODES, screen.height - others - 2)  # the header, and the number of omitted nodes
        if len(nodes) > room:  # nodes with problems come first
            nodes = sorted(nodes, key=_is_well)[:room]
    more = len(snapshot.nodes) - len(nodes) + snapshot.not_shown
    columns = [column for column in _COLUMNS if screen is None or screen.width >= column[1]]
    columns = [column for column in columns if column[0] != "DOMAIN" or any(node.domain for node in snapshot.nodes)]
    rows = ([text(node, screen) for _, _, text in columns] for node in nodes)
    title, *texts = table([[name for name, _, _ in columns], *rows])
    lines = [Line(text, _NODE_STYLES.get(node_state(node), "")) for text, node in zip(texts, nodes, strict=True)]
    return [Line(title, "bold"), *lines, *([Line(f"and {more} more nodes", "dim")] if more else [])]


def _pids(node: NodeView, _screen: OnScreen | None) -> str:
    report = node.report
    if report is None:
        return "-"
    ended = {local_rank for local_rank, _, _ in report.ended}
    return " ".join("-" if rank in ended else str(pid) for rank, pid in enumerate(report.pids)) or "-"


_COLUMNS: tuple[tuple[str, int, Callable[[NodeView, OnScreen | None], str]], ...] = (
    ("RANK", 0, lambda node, _: "-" if node.group_rank < 0 else str(node.group_rank)),
    ("NODE", 0, lambda node, _: node.host or node.name),
    ("ADDRESS", 60, lambda node, _: node.address),
    ("DOMAIN", 0, lambda node, _: node.domain or "-"),
    ("STATE", 0, lambda node, _: state_words(node)),
    ("RANKS", 0, lambda node, _: rank_range(node)),
    ("HEARD", 80, lambda node, screen: "-" if node.silent_for < 0 else _time_text(node.silent_for, screen)),
    ("PIDS", 100, _pids),
)
"""Titles, the minimum screen width for each column, and its content."""


def _worker_lines(snapshot: Snapshot, screen: OnScreen | None) -> list[Line]:
    """Remarks about workers that raised but are still running, wait for a blocked console, or ended while others are
    still running.
    """
    reports = (node.report for node in snapshot.nodes if node.report is not None)
    lines = [Line(f"  {remark}", "yellow") for report in reports for remark in report.remarks]
    for node in snapshot.nodes:
        if node.report is not None and node.report.console_blocked >= _BLOCKED:
            blocked = node.report.console_blocked
            since = f"for {duration(blocked)}" if screen is None else f"since {_time_text(blocked, screen)}"
            waiters = node.report.console_waiters
            who = f": {_ranks(node, waiters)} {'is' if len(waiters) == 1 else 'are'} waiting for it" if waiters else ""
            lines.append(Line(f"  the console of {node.host or node.name} has not been read {since}{who}", "yellow"))
    for node in snapshot.nodes:
        by_code: dict[int, dict[int, float]] = {}
        for local_rank, code, age in () if node.report is None else node.report.ended:
            by_code.setdefault(code, {})[local_rank] = age
        for code, ages in sorted(by_code.items()):
            ranks = _ranks(node, [*ages])
            last = "the last " if len(ages) > 1 else ""
            when = _time_text(min(ages.values()), screen)
            how = f"{code} ({signal_name(-code)})" if code < 0 else str(code)
            lines.append(Line(f"  {ranks} on {node.host or node.name} ended with {how}, {last}{when}"))
    return lines


def _ranks(node: NodeView, local_ranks: Sequence[int]) -> str:
    """`rank 4`, `ranks 4-7`, `ranks 0 and 3`; local ranks while the node has no global ones."""
    first = max(0, node.first_rank)
    kind = "local rank" if node.first_rank < 0 else "rank"
    return f"{kind}{'' if len(local_ranks) == 1 else 's'} {join_names(ranges(first + rank for rank in local_ranks))}"


def _straggler_lines(snapshot: Snapshot) -> list[Line]:
    """Show ranks whose reported steps (`notices.progress`) are behind the others'."""
    steps = snapshot.totals.steps
    late = [] if steps is None else [straggler for straggler in steps.behind if straggler.behind > _USUAL_LAG]
    if steps is None or not late:
        return []
    rows = [("RANK", "NODE", "STEP", "BEHIND")]
    rows += [
        (str(straggler.rank), straggler.node, str(straggler.step), str(straggler.behind))
        for straggler in late[:_STRAGGLERS]
    ]
    more = (steps.late if len(late) == len(steps.behind) else len(late)) - _STRAGGLERS
    lines = [Line(f"  {row}") for row in table(rows)] + ([Line(f"  and {more} more")] if more > 0 else [])
    return _titled(f"steps behind the median ({steps.median}) of {steps.ranks} ranks", lines)


def _traceback_lines(snapshot: Snapshot) -> list[Line]:
    last = snapshot.failures[-1] if snapshot.failures else None
    if last is None or not last.traceback:
        return []
    lines = last.traceback.rstrip().splitlines()
    cut_off = [Line(f"  ({len(lines) - _TRACEBACK} more lines: --json)", "dim")] if len(lines) > _TRACEBACK else []
    shown = [Line(f"  {line}") for line in lines[-_TRACEBACK:]]
    return _titled(f"last traceback (rank {last.rank} on {last.host})", [*cut_off, *shown])


def failure_text(failure: FailureView) -> str:
    lost = f"{failure.node} was lost: " if failure.rank < 0 and not failure.pid else ""
    return f"round {failure.round}: {lost}{failure.message}"


def _failure_lines(snapshot: Snapshot, screen: OnScreen | None) -> list[Line]:
    return [
        Line(f"  {_time_text(failure.seconds_ago, screen)}, {failure_text(failure)}", "red")
        for failure in snapshot.failures
    ]


def _event_lines(snapshot: Snapshot, screen: OnScreen | None) -> list[Line]:
    return [Line(f"  {_time_text(event.seconds_ago, screen)}: {event.text}") for event in snapshot.events]


# Successive lines


class NewEvents:
    """Yields each event in successive snapshots once."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._number = 0
        """Number of the last event taken."""

    def new_in(self, snapshot: Snapshot) -> Sequence[JobEvent]:
        if snapshot.incarnation != self._incarnation:
            self._incarnation, self._number = snapshot.incarnation, 0
        news = [event for event in snapshot.events if event.number > self._number]
        self._number = max([self._number, *(event.number for event in news)])
        return news


class ChangeLines:
    def __init__(self) -> None:
        self._events = NewEvents()
        self._standing: tuple[object, ...] | None = None
        """The job's state as last described, without durations."""

    def lines(self, snapshot: Snapshot, now: float) -> Iterator[str]:
        """Yield the news in a snapshot, each line with a time of day; `now` is in seconds since 1970."""
        first = self._standing is None
        news = self._events.new_in(snapshot)
        if not first:  # a new watcher sees the current state, not the past
            yield from (f"{clock_time(now - event.seconds_ago)} {event.text}" for event in news)
        standing = _visible_state(snapshot)
        # An event has already reported the start or end of a round, but not the nodes while one is forming.
        told_by_event = snapshot.phase not in _FORMING and bool(news)
        if standing != self._standing and (first or not told_by_event):
            job = f"job {snapshot.job}, round {snapshot.round}: " if first else ""
            text = f"{job}{phase_sentence(snapshot)}"
            yield f"{clock_time(now)} {text}{f'; restarts: {restarts_sentence(snapshot)}' if first else ''}"
        self._standing = standing


def clock_time(moment: float) -> str:
    """A time of day on this machine's clock, `14:03:59`."""
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _visible_state(snapshot: Snapshot) -> tuple[object, ...]:
    forms = (snapshot.totals.in_round, snapshot.expected) if snapshot.phase in _FORMING else ()
    return (snapshot.phase, snapshot.round, snapshot.min_nodes, snapshot.max_nodes, *forms)


# JSON


def status_json(snapshot: Snapshot, now: float, ended: Sequence[JobSummary] | None = None) -> str:
    """Format the JSON; times are counted back from `now`, the caller's time of day in seconds since 1970.

    `ended` are the same control plane's ended jobs; None if not requested.
    """
    fields = status_fields(snapshot, now)
    if ended is not None:
        fields["ended"] = [_summary(job, now) for job in ended]
    return msgspec.json.format(json.dumps(fields), indent=2)  # ten times as fast as indenting with `dumps`


def status_fields(snapshot: Snapshot, now: float) -> dict[str, Any]:
    ended = snapshot.ended_rounds
    left = None if snapshot.max_restarts < 0 else max(0, snapshot.max_restarts - ended.failures)
    return {
        "version": VERSION,
        "job": snapshot.job,
        "phase": snapshot.phase.value,
        "since": moment(now - snapshot.phase_for),
        "phase_seconds": round(snapshot.phase_for, 3),
        "age_seconds": round(snapshot.age, 3),
        "endpoint": snapshot.endpoint or None,
        "command": snapshot.totals.command or None,
        "round": snapshot.round,
        "min_nodes": snapshot.min_nodes,
        "max_nodes": snapshot.max_nodes,
        "missing_nodes": snapshot.missing,
        "expected": list(snapshot.expected),
        "removed": [
            {"name": name, "reason": reason.value, "seconds_ago": _if_known(age), "ended_with_0": ended_with_0}
            for name, reason, age, ended_with_0 in snapshot.removed
        ],
        "nodes": [_node(node) for node in snapshot.nodes],
        "nodes_not_shown": snapshot.not_shown,
        "totals": _totals(snapshot.totals),
        "stragglers": _stragglers(snapshot),
        "restarts": {
            "failures": ended.failures,
            "nodes_lost": ended.lost,
            "departures": ended.departed,
            "membership_changes": ended.drained,
            "requested": ended.requested,
            "left": left,
        },
        "backoff_seconds": round(snapshot.backoff, 3),
        "failures": [_failure(failure, now) for failure in snapshot.failures],
        "events": [_event(event, now) for event in snapshot.events],
        "detail": snapshot.detail,
        "ending": None if snapshot.ending is None else snapshot.ending.name.lower(),
    }


def event_json(event: JobEvent, now: float) -> str:
    return json.dumps(_event(event, now))


def jobs_json(jobs: JobList, now: float) -> str:
    return json.dumps(jobs_fields(jobs, now), indent=2)


def jobs_fields(jobs: JobList, now: float) -> dict[str, Any]:
    return {
        "version": VERSION,
        "jobs": [_summary(job, now) for job in jobs.jobs],
        "ended": [_summary(job, now) for job in jobs.ended],
    }


def _summary(job: JobSummary, now: float) -> dict[str, Any]:
    return {
        "job": job.job,
        "phase": job.phase.value,
        "since": moment(now - job.phase_for),
        "age_seconds": round(job.age, 3),
        "round": job.round,
        "restarts": job.restarts,
        "nodes": job.nodes,
        "max_nodes": job.max_nodes,
        "detail": job.detail,
    }


def moment(seconds: float) -> str:
    """A time of day as in RFC 3339, in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _if_known(number: float) -> float | None:
    return None if number < 0 else round(number, 3)


def _node(node: NodeView) -> dict[str, Any]:
    last = node.first_rank + node.workers
    return {
        "name": node.name,
        "host": node.host,
        "address": node.address,
        "pid": node.pid,
        "state": node_state(node),
        "connected": node.connected,
        "heard_seconds_ago": _if_known(node.silent_for),
        "group_rank": None if node.group_rank < 0 else node.group_rank,
        "global_ranks": list(range(node.first_rank, last)) if node.first_rank >= 0 else [],
        "local_world_size": node.workers,
        "role": node.role,
        "quiet": node.quiet,
        "drained_by": node.drained_by or None,
        "domain": node.domain or None,
        "waits_for": node.waits_for or None,
        "workers": None if node.report is None else _report(node.report),
    }


def _report(report: NodeReport) -> dict[str, Any]:
    return {
        "pids": list(report.pids),
        "progress": None if report.progress < 0 else report.progress,
        "progress_seconds_ago": _if_known(report.progress_age),
        "steps": [None if step < 0 else step for step in report.steps],
        "first_step": None if report.first_step < 0 else report.first_step,
        "first_step_seconds_ago": _if_known(report.first_step_age),
        "step_before": None if report.step_before < 0 else report.step_before,
        "output_seconds_ago": [_if_known(age) for age in report.output_ages],
        "in_place_of": report.in_place_of or None,
        "standby_pids": list(report.standby),
        "standby_ready": report.standby_ready,
        "log_folder": report.log_folder or None,
        "console_blocked_seconds": _if_known(report.console_blocked),
        "console_waiters": list(report.console_waiters),
        "remarks": list(report.remarks),
        "ended": [
            {"local_rank": rank, "exit_code": code, "seconds_ago": _if_known(age)} for rank, code, age in report.ended
        ],
        "watching_seconds": {name: _if_known(seconds) for name, seconds in report.watching},
        "figures": {name: int(figure) if figure.is_integer() else figure for name, figure in report.figures},
    }


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "states": {state: getattr(totals, state) for state in NODE_STATES},
        "quiet": totals.quiet,
        "reported": totals.reported,
        "workers": totals.workers,
        "least_step": None if totals.least_step < 0 else totals.least_step,
        "most_step": None if totals.most_step < 0 else totals.most_step,
    }


def _stragglers(snapshot: Snapshot) -> dict[str, Any] | None:
    steps = snapshot.totals.steps
    if steps is None:
        return None
    behind = [straggler._asdict() for straggler in steps.behind]
    return {"median_step": steps.median, "ranks": steps.ranks, "behind": behind}


def _failure(failure: FailureView, now: float) -> dict[str, Any]:
    return {
        "time": moment(now - failure.seconds_ago),
        "round": failure.round,
        "node": failure.node,
        "host": failure.host,
        "rank": None if failure.rank < 0 else failure.rank,
        "local_rank": None if failure.local_rank < 0 else failure.local_rank,
        "pid": failure.pid or None,
        "exitcode": None if failure.rank < 0 else failure.exitcode,
        "message": failure.message,
        "traceback": failure.traceback or None,
    }


def _event(event: JobEvent, now: float) -> dict[str, Any]:
    return {
        "number": event.number,
        "time": moment(now - event.seconds_ago),
        "kind": event.kind.value.replace(" ", "_"),
        "round": event.round,
        "node": event.node,
        "text": event.text,
    }
