"""The state of a job, in lines for a person. Pure: the width of the terminal is passed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rallypoint.observe.stragglers import steps_of
from rallypoint.protocol.observation import FailureView, JobSummary, NodeState, NodeView, Phase, Snapshot

_LEAST_WIDTH = 40
_EVENTS, _FAILURES = 8, 5
"""The number of newest ones that are shown."""
_STRAGGLERS = 10
"""How many ranks are shown that are behind the others: the last of them."""


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


def status_lines(snapshot: Snapshot, width: int = 120) -> list[str]:
    """All that there is to say of a job, each line at most `width` characters long."""
    lines = [
        *_head(snapshot),
        "",
        *_node_table(snapshot),
        *_stragglers(snapshot),
        *_failures(snapshot),
        *_events(snapshot),
    ]
    most = max(width, _LEAST_WIDTH)
    return [each if len(each) <= most else f"{each[: most - 1]}…" for each in lines]


def job_lines(jobs: Sequence[JobSummary]) -> list[str]:
    """A table of jobs."""
    if not jobs:
        return ["no jobs"]
    rows = [("JOB", "PHASE", "ROUND", "NODES")]
    rows += [(each.job, each.phase.value, str(each.round), f"{each.nodes}/{each.max_nodes}") for each in jobs]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def phase_sentence(snapshot: Snapshot) -> str:
    """The phase, for how long, and what is waited for."""
    since = f"for {duration(snapshot.phase_for)}"
    participants = sum(each.state is NodeState.PARTICIPANT for each in snapshot.nodes)
    match snapshot.phase:
        case Phase.WAITING:
            who = f" ({', '.join(snapshot.expected)})" if snapshot.expected else ""
            return f"waiting {since}: {participants} of {snapshot.min_nodes} nodes, {snapshot.missing} missing{who}"
        case Phase.FORMING:
            return f"forming {since}: {participants} of at most {snapshot.max_nodes} nodes"
        case Phase.HELD_BACK:
            return f"held back {since}: next round in {duration(snapshot.backoff)}"
        case Phase.RUNNING:
            return f"running {since}"
        case _:
            return f"{snapshot.phase.value} {duration(snapshot.phase_for)} ago: {snapshot.detail}"


def restarts_sentence(snapshot: Snapshot) -> str:
    """How many rounds have ended, by cause, and how many restarts are left."""
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


def rank_range(node: NodeView) -> str:
    """`4-7`, the global ranks of a node's workers; `-` where it has none."""
    if node.first_rank < 0 or not node.workers:
        return "-"
    last = node.first_rank + node.workers - 1
    return str(last) if last == node.first_rank else f"{node.first_rank}-{last}"


def node_state(node: NodeView) -> str:
    """The role of a node in the job, in a word or two."""
    if node.state is NodeState.PARTICIPANT and not node.connected:
        return "unreachable"
    return "succeeded" if node.succeeded else node.state.value


def _head(snapshot: Snapshot) -> Iterator[str]:
    yield f"job       {snapshot.job}"
    yield f"phase     {phase_sentence(snapshot)}"
    waiting = sum(each.state is NodeState.WAITING for each in snapshot.nodes)
    spare = sum(each.state is NodeState.SPARE for each in snapshot.nodes)
    extra = "".join(f", {count} {what}" for what, count in (("waiting", waiting), ("spare", spare)) if count)
    participants = sum(each.state is NodeState.PARTICIPANT for each in snapshot.nodes)
    yield f"round     {snapshot.round}"
    yield f"nodes     {participants} (min {snapshot.min_nodes}, max {snapshot.max_nodes}){extra}"
    yield f"restarts  {restarts_sentence(snapshot)}"
    steps = [each.report.progress for each in snapshot.nodes if each.report is not None and each.report.progress >= 0]
    if steps:
        yield f"progress  step {min(steps)}" + (f" to {max(steps)}" if max(steps) != min(steps) else "")


def _node_table(snapshot: Snapshot) -> list[str]:
    if not snapshot.nodes:
        return ["no nodes"]
    rows = [("RANK", "NODE", "ADDRESS", "STATE", "RANKS", "HEARD", "PIDS")]
    rows += [
        (
            "-" if each.group_rank < 0 else str(each.group_rank),
            each.host or each.name,
            each.address,
            node_state(each),
            rank_range(each),
            "-" if each.silent_for < 0 else f"{duration(each.silent_for)} ago",
            "-" if each.report is None or not each.report.pids else " ".join(map(str, each.report.pids)),
        )
        for each in snapshot.nodes
    ]
    return table(rows)


def _stragglers(snapshot: Snapshot) -> list[str]:
    steps = steps_of(snapshot)
    if steps is None or not steps.behind:
        return []
    rows = [("RANK", "NODE", "STEP", "BEHIND")]
    rows += [(str(each.rank), each.node, str(each.step), str(each.behind)) for each in steps.behind[:_STRAGGLERS]]
    more = len(steps.behind) - _STRAGGLERS
    title = f"steps behind the median of {steps.ranks} ranks, which is {steps.median}"
    return ["", title, *(f"  {each}" for each in table(rows)), *([f"  and {more} more"] if more > 0 else [])]


def failure_sentence(failure: FailureView) -> str:
    """One failure, for people."""
    return f"{duration(failure.seconds_ago)} ago, {failure_text(failure)}"


def failure_text(failure: FailureView) -> str:
    """The same without its age."""
    lost = f"{failure.node} was lost: " if failure.rank < 0 and not failure.pid else ""
    return f"round {failure.round}: {lost}{failure.message}"


def _failures(snapshot: Snapshot) -> list[str]:
    newest = snapshot.failures[-_FAILURES:]
    return ["", "last failures", *(f"  {failure_sentence(each)}" for each in newest)] if newest else []


def _events(snapshot: Snapshot) -> list[str]:
    newest = snapshot.events[-_EVENTS:]
    if not newest:
        return []
    return ["", "last events", *(f"  {duration(each.seconds_ago)} ago: {each.text}" for each in newest)]
