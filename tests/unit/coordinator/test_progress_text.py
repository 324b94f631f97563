"""Sentences about an incomplete rendezvous that no transcript shows."""

from __future__ import annotations

import time

import pytest

from rallypoint.control.membership.state import Reason
from rallypoint.control.protocol.messages import MissingNode, Progress
from rallypoint.observe.rendezvous_log import (
    RendezvousName,
    ReportedProgress,
    is_due,
    timeout_sentence,
    waiting_line,
)

SUBJECT = RendezvousName("job", "at n1:29400")
FIXED = Progress(0, False, 2, 3, 3, (), False, members=("n1", "n2"))
ELASTIC = Progress(0, False, 2, 2, 4, (), False, members=("n1", "n2"))
WALL = time.mktime((2026, 5, 4, 0, 10, 0, 0, 0, -1))
LOST = (MissingNode("n3 (rank 2)", Reason.LOST, 18.0),)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            FIXED._replace(removed=LOST, ends_in=5.0),
            "2 of 3 nodes have joined (n1, n2), 1 is missing; n3 (rank 2) was lost at 00:09:42 and no node has "
            "replaced it; giving up in 5 s",
        ),
        (
            FIXED._replace(joined=1, removed=(*LOST, MissingNode("n2", Reason.DEPARTED, 0.0, ended_with_0=True))),
            "1 of 3 nodes have joined (n1, n2), 2 are missing; n3 (rank 2) was lost at 00:09:42 and n2 left at "
            "00:10:00 (all its ranks exited with code 0) and no node has replaced them",
        ),
        (
            ELASTIC._replace(round=3, backoff=8.0, starts_in=6.0),
            "2 of up to 4 nodes have joined (n1, n2); held back for 8 s after failures without progress; starting in 6 "
            "s",
        ),
        (FIXED._replace(members=("n1\x1b[31m", "n2")), "2 of 3 nodes have joined (n1?[31m, n2), 1 is missing"),
    ],
)
def test_waiting_lines(progress: Progress, words: str) -> None:
    assert waiting_line(SUBJECT, progress, WALL) == f"waiting for the rendezvous of job 'job' at n1:29400: {words}"


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            FIXED._replace(removed=LOST),
            "failed: n3 (rank 2) was lost at 00:09:42 and no node has replaced it within 18 s, 2 of 3 nodes had joined "
            "(n1, n2), 1 was missing; start a node in its place, or let the job continue with fewer (--nnodes=2:3)",
        ),
        (ELASTIC._replace(complete=True), "had no place for n1 within 10 s: round 0 runs with 2 nodes (n1, n2)"),
    ],
)
def test_timeout_sentences(progress: Progress, words: str) -> None:
    told = timeout_sentence(SUBJECT, progress._replace(gave_up_by="n1", waited=10.0), WALL)
    assert told == f"the rendezvous of job 'job' at n1:29400 {words}"


def test_changes_are_logged_at_once_and_repetitions_once_a_minute() -> None:
    said: ReportedProgress = {}
    many = FIXED._replace(min_nodes=30, max_nodes=30)
    asked = (2.0, 6.0, 14.0, 30.0, 60.0, 62.0, 121.9)
    lines = [now for now in asked if is_due(many._replace(joined=int(now) % 29, ends_in=600 - now), said, now)]
    assert lines == [2.0, 62.0, 121.9]
    assert is_due(FIXED._replace(removed=LOST), said, 123.0)
    assert not is_due(FIXED._replace(removed=(LOST[0]._replace(seconds_ago=20.0),)), said, 125.0)
    assert is_due(ELASTIC._replace(starts_in=18.0), said, 126.0)
    assert is_due(FIXED._replace(round=1), said, 127.0)
