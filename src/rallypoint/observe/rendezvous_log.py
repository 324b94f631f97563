"""Logs, on a node and at the coordinator, why a rendezvous is incomplete, and how nodes differ.

Data from the control plane is cleaned here when it becomes text. Seconds become times of day on this host's clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.base.log import get_logger, printable
from rallypoint.control.coordinator.extension import Extension
from rallypoint.control.membership.state import Reason, join_names
from rallypoint.control.protocol.messages import (
    ConfigDifference,
    ConfigDiffers,
    JoinRefused,
    MissingNode,
    Progress,
    ProgressText,
)

if TYPE_CHECKING:
    from rallypoint.control.coordinator.coordinator import Coordinator

log = get_logger(__name__)


class RendezvousName(NamedTuple):
    """Names a rendezvous: the job's id, the meeting place, as in `at host:port` (empty if no other node can join), and
    the flag or variable that set the place.
    """

    run_id: str
    where: str
    flag: str = "endpoint"

    def __str__(self) -> str:
        return f"the rendezvous of job {self.run_id!r}{f' {self.where}' if self.where else ''}"


ReportedProgress = dict[tuple[object, ...], float]
"""The lines that were logged about a rendezvous, and when."""

_REPEAT = 59.0
"""Seconds until the same line is logged again: a minute, minus the jitter of answers."""

_REMOVAL_WORDS = {Reason.LOST: "was lost", Reason.DEPARTED: "left", Reason.GAVE_UP: "gave up"}


def waiting_line(subject: RendezvousName, progress: Progress, wall: float) -> str:
    """Compose a waiting node's log line. `wall` is the time in seconds since 1970."""
    return (
        f"waiting for {subject}: {_joined_words(progress)}{_removed_clause(progress, wall)}{_time_left_words(progress)}"
    )


def live_words(progress: Progress) -> tuple[str, str]:
    """A short form for a live line: the texts before and after the elapsed time."""
    joined, short = progress.joined, progress.min_nodes - progress.joined
    if progress.spare:
        of_all = f"all {progress.max_nodes} places of round {progress.round} are taken"
        return "waiting as a spare", of_all if progress.segment < 2 else f"round {progress.round} runs"
    if progress.complete:
        return "waiting for the next round", f"round {progress.round} runs with {_nodes(joined)}"
    if short > 0:
        least = "" if progress.min_nodes == progress.max_nodes else "at least "
        who = f": {', '.join(map(printable, progress.expected))}" if progress.expected else ""
        after = f"missing {least}{short}{who}"
    elif progress.starts_in >= 0:
        after = f"starting in {progress.starts_in:.0f} s"
    else:
        after = "enough; more may join" if progress.backoff <= 0 else f"held back for {progress.backoff:g} s"
    return f"waiting for nodes: {joined} of {progress.max_nodes} joined", after


def is_due(progress: Progress, reported_at: ReportedProgress, now: float) -> bool:
    """Whether the line is due: the state changed, or it was last logged a minute ago. If due, record it as logged.

    A joining node does not count as a change, since there may be many.
    """
    short, lost = progress.joined < progress.min_nodes, tuple(removed.name for removed in progress.removed)
    stands = progress.round, progress.complete, progress.spare, short, progress.starts_in >= 0, lost
    if any(reported[0] != progress.round for reported in reported_at):
        reported_at.clear()
    if now - reported_at.get(stands, -_REPEAT) < _REPEAT:
        return False
    reported_at[stands] = now
    return True


def in_words(
    notification: Progress | JoinRefused,
    subject: RendezvousName,
    reported_at: ReportedProgress,
    now: float,
    wall: float,
) -> ProgressText | JoinRefused:
    """Add a text to a progress or join-timeout notification.

    `now` is a time on the clock of `reported_at`; `wall` is in seconds since 1970.
    """
    if isinstance(notification, Progress):
        due = notification.reports and is_due(notification, reported_at, now)
        short = not notification.complete and notification.joined < notification.min_nodes
        return ProgressText(waiting_line(subject, notification, wall), due, live_words(notification), short)
    if notification.progress is None:
        return notification
    return notification._replace(detail=timeout_sentence(subject, notification.progress, wall))


def timeout_sentence(subject: RendezvousName, progress: Progress, wall: float) -> str:
    """Say why a join timed out. `wall` is the time in seconds since 1970."""
    who, seconds = printable(progress.gave_up_by), f"{progress.waited:.0f} s"
    if progress.complete:
        running = f"round {progress.round} runs with {_nodes(progress.joined)}{_names(progress.members)}"
        return f"{subject} had no place for {who} within {seconds}: {running}"
    missed = _fatal_losses(progress)
    if missed:
        age = max(node.seconds_ago for node in missed)
        fewer = f"{progress.joined}:{progress.max_nodes}" if progress.joined else f"1:{progress.max_nodes}"
        return (
            f"{subject} failed: {_removed_words(missed, wall)} within {age:.0f} s, "
            f"{_joined_words(progress, past=True)}; "
            f"start a node in its place, or let the job continue with fewer (--nnodes={fewer})"
        )
    return (
        f"{subject} did not complete: {who} has waited for {seconds}, {_joined_words(progress, past=True)}; "
        f"check that all nodes were started with the same {subject.flag}, --nnodes and --rdzv-id"
    )


def _joined_words(progress: Progress, *, past: bool = False) -> str:
    joined, names = progress.joined, _names(progress.members)
    if progress.spare and progress.segment > 1:
        return f"round {progress.round} runs without this node, which waits as a spare: for a place in a segment"
    if progress.spare:
        return f"all {progress.max_nodes} places of round {progress.round} are taken; this node waits as a spare"
    if progress.complete:
        return f"round {progress.round} runs with {_nodes(joined)}{names}; this node waits for the next round"
    one, many, have = ("was", "were", "had") if past else ("is", "are", "have")
    fixed = progress.min_nodes == progress.max_nodes
    short = progress.min_nodes - joined
    bounds = f"{progress.min_nodes}" if fixed else f"{progress.min_nodes} to {progress.max_nodes}"
    bounds = bounds if short > 0 or fixed else f"up to {progress.max_nodes}"
    missing = f", {short} {one if short == 1 else many} missing" if short > 0 else ""
    awaited = join_names([printable(name) for name in progress.expected])
    if awaited:  # list all missing nodes if the number is fixed and no node left permanently
        awaited = f": {awaited}" if missing and fixed and not progress.removed else f", still to come: {awaited}"
    whole = f" (whole segments of {progress.segment} nodes of one domain)" if progress.segment > 1 else ""
    return f"{joined} of {bounds} nodes{whole} {have} joined{names}{missing}{awaited}"


def _removed_clause(progress: Progress, wall: float) -> str:
    missed = _fatal_losses(progress)
    return f"; {_removed_words(missed, wall)}" if missed else ""


def _fatal_losses(progress: Progress) -> Sequence[MissingNode]:
    """Nodes that left, if too few remain."""
    return () if progress.complete or progress.joined >= progress.min_nodes else progress.removed


def _removed_words(missed: Sequence[MissingNode], wall: float) -> str:
    losses = [
        f"{printable(who.name)} {_REMOVAL_WORDS.get(who.reason, 'went')} at "
        f"{_time_of_day(wall - who.seconds_ago)}{' (all its ranks exited with code 0)' if who.ended_with_0 else ''}"
        for who in missed
    ]
    return f"{join_names(losses)} and no node has replaced {'it' if len(losses) == 1 else 'them'}"


def _time_left_words(progress: Progress) -> str:
    back_off = f"held back for {progress.backoff:g} s after failures without progress"
    if progress.backoff and progress.round == 0:
        back_off = "a round that the control plane has lost might still be running, so the rendezvous waits "
        back_off += f"{progress.backoff:g} s for its nodes"
    parts = [back_off] if progress.backoff and not progress.complete else []
    parts += [f"starting in {progress.starts_in:.0f} s"] if progress.starts_in >= 0 else []
    parts += [f"giving up in {progress.ends_in:.0f} s"] if progress.ends_in >= 0 else []
    return "".join(f"; {part}" for part in parts)


def _names(names: Sequence[str]) -> str:
    return f" ({', '.join(printable(name) for name in names)})" if names else ""


def _nodes(number: int) -> str:
    return f"{number} node{'' if number == 1 else 's'}"


def _time_of_day(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))


# Coordinator's log


_MAX_NAMED = 4
"""Maximum number of nodes to list per differing setting, and maximum number of values to show for each."""


class JobLog(Extension):
    """The log of a coordinator's job."""

    def __init__(self, job: Coordinator) -> None:
        self.job = job
        self._run_id = job.settings.run_id
        self._reported_progress: ReportedProgress = {}
        self._differing: Counter[ConfigDifference] = Counter()

    def on_message(self, message: Any, now: float) -> None:
        """Log differences. Also log progress, if the coordinator is outside the job and has its own log."""
        if isinstance(message, ConfigDiffers):
            self._log_differences(message)
        elif self.job.learns_settings:
            self._log_progress(message, now)

    def _log_differences(self, notification: ConfigDiffers) -> None:
        """Log how a node differs from the job, once per kind of difference."""
        for difference in notification.differences:
            if difference not in self._differing and len(self._differing) >= _MAX_NAMED**2:
                continue
            self._differing[difference] += 1
            if self._differing[difference] <= _MAX_NAMED:
                sentence = difference.sentence(notification.node)
                log.warning("job %r: %s; use the same value on all nodes", self._run_id, sentence)

    def _log_progress(self, notification: Progress | JoinRefused, now: float) -> None:
        """Log the rendezvous's progress if this node must; `now` is monotonic."""
        how_far = notification if isinstance(notification, Progress) else notification.progress
        if how_far is None or not how_far.reports:
            return
        words = in_words(notification, RendezvousName(self._run_id, ""), self._reported_progress, now, time.time())
        if isinstance(words, JoinRefused):
            log.warning("%s", words.detail)
        elif words.warning:
            log.warning("%s", words.text)
