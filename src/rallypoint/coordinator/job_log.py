"""What people beside the coordinator are told of a job: how far its rendezvous is, and how its nodes differ."""

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
"""Of how many nodes that differ from the job in one thing people here are told, and in how many values of each."""


class JobLog:
    """Of the job of that id."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._reported_progress: ReportedProgress = {}
        self._differing: Counter[ConfigDifference] = Counter()

    def log_differences(self, notification: ConfigDiffers) -> None:
        """Tell that a node differs from the job; not of each that differs as others do."""
        for each in notification.differences:
            if each not in self._differing and len(self._differing) >= _MAX_NAMED**2:
                continue
            self._differing[each] += 1
            if self._differing[each] <= _MAX_NAMED:
                sentence = each.sentence(notification.node)
                log.warning("job %r: %s; give all nodes of a job the same", self._run_id, sentence)

    def log_progress(self, notification: Progress | JoinRefused, now: float) -> None:
        """Tell how far the rendezvous is, where it is this node's part to tell people; `now` is monotonic."""
        how_far = notification if isinstance(notification, Progress) else notification.progress
        if how_far is None or not how_far.reports:
            return
        from rallypoint.coordinator.progress_text import RendezvousName, in_words

        words = in_words(notification, RendezvousName(self._run_id, ""), self._reported_progress, now, time.time())
        if isinstance(words, JoinRefused):
            log.warning("%s", words.detail)
        elif words.warning:
            log.warning("%s", words.text)
