"""Finds where the processes that a worker has started wait: a data loader that hangs does so there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.base.clock import Deadline
from rallypoint.base.log import printable
from rallypoint.base.process_table import process_table
from rallypoint.hangs.frames import main_frames
from rallypoint.hangs.messages import MAX_CHILD_FRAMES, MAX_CHILDREN, MAX_TEXT, ProcessEvidence
from rallypoint.hangs.processes import process_state
from rallypoint.hangs.stacks import stacks_of_workers

_HELPERS = ("multiprocessing/resource_tracker.py", "multiprocessing/forkserver.py")
"""The places where Python's own helper processes wait, which are of no interest."""


class Child(NamedTuple):
    """A process below a worker: what is sent, and all that py-spy says."""

    pid: int
    found: ProcessEvidence
    text: str


def children_of(workers: Mapping[int, int], deadline: Deadline) -> dict[int, list[Child]]:
    """The processes below each of these workers, the first `MAX_CHILDREN` of each.

    Args:
        workers: process id by global rank.
        deadline: until when py-spy may look at them.
    """
    if not workers:
        return {}
    below = {rank: _below(pid)[:MAX_CHILDREN] for rank, pid in workers.items()}
    every = {pid: pid for pids in below.values() for pid in pids}
    texts = {each.pid: each for each in stacks_of_workers(every, deadline)}
    found = {rank: [_child(pid, texts[pid].text) for pid in pids] for rank, pids in below.items()}
    return {rank: [each for each in children if not _is_helper(each)] for rank, children in found.items()}


def _below(root: int) -> list[int]:
    try:
        table = process_table()
    except OSError:  # no descriptor is free
        return []
    found, parents = [], {root}
    while parents:
        parents = {pid for pid, each in table.items() if each.parent in parents and not each.ended}
        found += sorted(parents)
    return found


def _child(pid: int, text: str) -> Child:
    state = process_state(pid)
    frames = main_frames(text)[:MAX_CHILD_FRAMES]
    return Child(pid, ProcessEvidence(state.name, printable(state.where, MAX_TEXT), frames), text)


def _is_helper(child: Child) -> bool:
    frames = child.found.frames
    return bool(frames) and frames[0].file.endswith(_HELPERS)
