"""Logs about a job on the coordinator's side: the progress of its rendezvous, and how its nodes differ."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from rallypoint.base.log import get_logger
from rallypoint.protocol.messages import ConfigDifference, ConfigDiffers, JoinRefused, Progress

if TYPE_CHECKING:
    from rallypoint.coordinator.progress_text import ReportedProgress

log = get_logger(__name__)

_MAX_NAMED = 4
"""The number of nodes that are named as different in one setting, and of values that are shown for each."""


class JobLog:
    """The log of the job with that id."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._reported_progress: ReportedProgress = {}
        self._differing: Counter[ConfigDifference] = Counter()

    def log_differences(self, notification: ConfigDiffers) -> None:
        """Log that a node differs from the job; not for each that differs in the same way."""
        for each in notification.differences:
            if each not in self._differing and len(self._differing) >= _MAX_NAMED**2:
                continue
            self._differing[each] += 1
            if self._differing[each] <= _MAX_NAMED:
                sentence = each.sentence(notification.node)
                log.warning("job %r: %s; give all nodes of a job the same", self._run_id, sentence)

    def log_progress(self, notification: Progress | JoinRefused, now: float) -> None:
        """Log the progress of the rendezvous, if this node is the one to log it; `now` is monotonic."""
        how_far = notification if isinstance(notification, Progress) else notification.progress
        if how_far is None or not how_far.reports:
            return
        from rallypoint.coordinator.progress_text import RendezvousName, in_words

        words = in_words(notification, RendezvousName(self._run_id, ""), self._reported_progress, now, time.time())
        if isinstance(words, JoinRefused):
            log.warning("%s", words.detail)
        elif words.warning:
            log.warning("%s", words.text)
