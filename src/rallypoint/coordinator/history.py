"""The history of a job: a bounded record of events and failures, for watchers. Pure: `now` is passed in.

Each change of the state costs only a comparison of a few fields, whatever the number of nodes. Messages (`observation`)
are not made from it before there is a watcher.
"""

from __future__ import annotations

from collections import deque

from rallypoint.failures.cause import Cause
from rallypoint.membership.state import Outcome, Reason, RoundEnd, State, Verdict, names_of

MAX_EVENTS, MAX_FAILURES = 200, 20
"""The number of newest events and failures that are kept."""

Event = tuple[float, int, str, int, str, str]
"""Time, number, kind (`observation.EventKind`), round, sentence, and the node that it concerns."""
Failure = tuple[float, int, str, Cause | None, str]
"""Time, round, node, cause (None for a failure of the node itself), and how it was lost."""


class JobHistory:
    """The newest events and failures of one job, and since when it is in its present phase."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.phase_since: float | None = None
        """When a round last began or ended to form or run, or the job ended; None before anything has happened."""
        self._number = 0

    def record(self, before: State, after: State, now: float) -> None:
        """The state has changed."""
        same = (before.round, before.complete, before.closed) == (after.round, after.complete, after.closed)
        if self.phase_since is None or not same:
            self.phase_since = now
        if before.round != after.round and before.complete and after.ended is not None:
            self._record_round_end(after.ended, now)
        if after.complete and (not before.complete or before.round != after.round):
            self.add("round started", after.round, _round_start(after), now)
        if after.complete and len(after.wait_list) > len(before.wait_list):
            names = names_of(after, [each for each in after.wait_list if each not in before.wait_list])
            self.add("node waiting", after.round, f"{', '.join(names)} waits for the next round", now)
        if after.is_preempted and not before.is_preempted and after.preempted is not None:
            text = f"{after.preempted.who} {after.preempted.why}: the job is preempted"
            self.add("job preempted", after.round, text, now, after.preempted.who)
        goes_on = not after.complete or after.is_preempted  # otherwise the end of the round tells it
        if goes_on and len(after.removed) > len(before.removed) and before.complete == after.complete:
            lost = after.removed[-1]
            self.add("node lost", after.round, f"{lost.name}: {lost.reason.value}", now, lost.name)
        if after.verdict is not None and before.verdict is None:
            self._record_verdict(after.verdict, after.round, now)

    def taken_over(self, before: State, state: State, now: float) -> None:
        """A coordinator continues from an earlier one, or from a node's report: how old that state is, is not known."""
        if (before.round, before.complete, before.closed) == (state.round, state.complete, state.closed):
            return
        self.phase_since = now
        runs = f"round {state.round} {'runs' if state.complete else 'forms'}"
        how = runs if state.verdict is None else verdict_sentence(state.verdict)
        self.add("coordinator started", state.round, f"another coordinator has taken over: {how}", now)

    def add(self, kind: str, round_: int, text: str, now: float, node: str = "") -> None:
        """Record an event; `text` is one sentence."""
        self._number += 1
        self.events.append((now, self._number, kind, round_, text, node))

    def _record_round_end(self, end: RoundEnd, now: float) -> None:
        if end.cause is not None:
            self.failures.append((now, end.round, end.node, end.cause, ""))
        elif end.reason is Reason.LOST:
            self.failures.append((now, end.round, end.node, None, end.detail or end.reason.value))
        why = end.cause.headline if end.cause is not None else end.detail
        who = f": {end.node}" if end.node else ""
        text = f"round {end.round} ended{who}: {end.reason.value}{f' ({why})' if why else ''}"
        self.add("round ended", end.round, text, now, end.node)

    def _record_verdict(self, verdict: Verdict, round_: int, now: float) -> None:
        if verdict.outcome is Outcome.FAILED and verdict.cause is not None:
            self.failures.append((now, round_, verdict.cause.host, verdict.cause, ""))
        self.add("job ended", round_, verdict_sentence(verdict), now)


def _round_start(state: State) -> str:
    """The sentence about a round's start: its number of nodes, and those that are new in it, such as a spare."""
    count = len(state.participants)
    came = [node for node, each in state.participants.items() if each.previous_rank is None] if state.round else []
    new = f", new: {', '.join(names_of(state, came))}" if came else ""
    return f"round {state.round} started with {count} node{'' if count == 1 else 's'}{new}"


def verdict_sentence(verdict: Verdict) -> str:
    """The sentence on how the job has ended."""
    why = verdict.detail or ("" if verdict.cause is None else verdict.cause.headline)
    return f"the job has {verdict.outcome.value}{f': {why}' if why else ''}"
