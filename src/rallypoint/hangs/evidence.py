"""Collects the evidence of a hang on one node.

Laws:

1. Nothing here may run on the agent's loop: py-spy takes seconds, and a file system may hang.
2. No worker is sent anything that could end it, and none is stopped: the requester may be wrong about the hang.
3. The data that a node sends are bounded, whatever its workers are in; all of it is kept on the node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import msgspec

from rallypoint.base.clock import Deadline
from rallypoint.base.log import get_logger, printable
from rallypoint.hangs.children import Child, children_of
from rallypoint.hangs.dumps import Recorder, take_dumps
from rallypoint.hangs.frames import calls_of, main_frames, waits_for_children
from rallypoint.hangs.messages import MAX_FRAMES, MAX_TEXT, NodeEvidence, RankEvidence
from rallypoint.hangs.processes import process_state
from rallypoint.hangs.stacks import TIMEOUT, WorkerStacks, stacks_of_workers

log = get_logger(__name__)

_MOST_FILES = 100
"""Files of evidence in one folder."""


class ExaminedWorker(NamedTuple):
    """A worker of this node. `exit_code` is None while it runs; `recorder` says how its flight recorder is asked."""

    rank: int
    pid: int
    exit_code: int | None = None
    recorder: Recorder | None = None


class ExaminedNode(NamedTuple):
    """This node as its agent's loop knows it. All of the evidence is kept in `folder`; empty for nowhere.
    `ends_workers`: they are ended when the evidence is there."""

    host: str
    workers: tuple[ExaminedWorker, ...]
    folder: str = ""
    ends_workers: bool = False


def collect_evidence(node: ExaminedNode) -> NodeEvidence:
    """Look at the workers of this node; takes as long as py-spy and the flight recorders do, ten seconds at most.

    Args:
        node: the workers, and where to keep what is found.
    """
    deadline = Deadline.after(TIMEOUT)
    running = {each.rank: each.pid for each in node.workers if each.exit_code is None and each.pid > 0}
    recorders = {each.rank: each.recorder for each in node.workers if each.rank in running and each.recorder}
    with ThreadPoolExecutor(1, "evidence") as beside:
        dumps = beside.submit(take_dumps, recorders, dump_folder(node.folder))
        stacks = {each.rank: each for each in stacks_of_workers(running, deadline)}
        found = {each.rank: _found(each, stacks.get(each.rank)) for each in sorted(node.workers)}
        waiting = {rank: pid for rank, pid in running.items() if waits_for_children(calls_of(found[rank].frames))}
        children = children_of(waiting, deadline)
        records = tuple(dumps.result())
    ranks = tuple(
        msgspec.structs.replace(each, children=tuple(child.found for child in children.get(rank, ())))
        for rank, each in found.items()
    )
    kept = _keep(node.folder, _whole_text(ranks, stacks, children)) if node.folder else ""
    written = next((each.dump.removesuffix(f"{rank}") for rank, each in recorders.items() if _is_there(each.dump)), "")
    where = printable(written, MAX_TEXT)
    return NodeEvidence(printable(node.host), ranks, printable(kept, MAX_TEXT), records, where, node.ends_workers)


def _is_there(path: str) -> bool:
    return bool(path) and os.path.exists(path)


def dump_folder(attempt: str) -> str:
    """The folder for dumps of flight recorders; empty if the output of the workers has none."""
    return os.path.join(attempt, "flight_recorder") if attempt else ""


def _found(worker: ExaminedWorker, stack: WorkerStacks | None) -> RankEvidence:
    if stack is None:
        return RankEvidence(worker.rank, "ended", worker.exit_code)
    state = process_state(worker.pid)
    frames = main_frames(stack.text)[:MAX_FRAMES]
    why = "" if frames else stack.error or "py-spy has found no Python in it"
    return RankEvidence(
        worker.rank,
        state.name,
        where=printable(state.where, MAX_TEXT),
        kernel=state.kernel,
        frames=frames,
        why_none=printable(why, MAX_TEXT),
    )


def _whole_text(
    ranks: Sequence[RankEvidence], stacks: Mapping[int, WorkerStacks], children: Mapping[int, Sequence[Child]]
) -> str:
    lines: list[str] = []
    for each in ranks:
        state = each.state if each.exit_code is None else f"{each.state} with exit code {each.exit_code}"
        lines.append(f"== rank {each.rank}: {state}{f' ({each.where})' if each.where else ''}")
        lines += ["kernel stack:", *(f"    {line}" for line in each.kernel)] if each.kernel else []
        stack = stacks.get(each.rank)
        lines += [stack.text.rstrip() or f"no stacks: {each.why_none}"] if stack is not None else []
        for child in children.get(each.rank, ()):
            lines += ["", f"-- process {child.pid} below rank {each.rank}: {child.found.state} ({child.found.where})"]
            lines += [child.text.rstrip() or "no stacks"]
        lines.append("")
    return "\n".join(lines)


def _keep(folder: str, text: str) -> str:
    """Write the text into a new file of the folder; returns its path, or nothing if the disk does not take it."""
    try:
        os.makedirs(folder, exist_ok=True)
        for number in range(_MOST_FILES):
            path = os.path.join(folder, f"hang.{number}.txt")
            with suppress(FileExistsError), open(path, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
                return os.path.abspath(path)
    except OSError as error:
        log.warning("the evidence of a hang cannot be kept in %s: %s", folder, error.strerror or error)
    return ""
