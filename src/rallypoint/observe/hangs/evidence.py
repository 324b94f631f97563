"""Collects the evidence of a hang on one node, and workers' Python stacks. They are read from outside, without stopping
the workers, by `base.python_memory` or, for a Python that it does not know, by py-spy if installed.

Laws:

1. Nothing here may run on the agent's loop: py-spy takes seconds, and a file system may hang.
2. No signal that could end a worker is sent, and no worker is stopped: the requester may be wrong about the hang.
3. The size of the data that a node sends is limited, whatever its workers do. The node itself saves everything.

The kernel reports the state of a process and its place in the kernel. If a worker seems to wait for its child
processes, these are examined too: a hang in a data loader is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from rallypoint.base.clock import Deadline
from rallypoint.base.log import get_logger, printable
from rallypoint.base.process_table import process_table, read_stat
from rallypoint.base.python_memory import PythonThread, UnknownPython, Unreadable, read_python
from rallypoint.control.protocol.validation import decoded
from rallypoint.observe.hangs.dumps import Recorder, take_dumps
from rallypoint.observe.hangs.messages import (
    MAX_CHILD_FRAMES,
    MAX_CHILDREN,
    MAX_TEXT,
    NodeEvidence,
    ProcessEvidence,
    RankEvidence,
    deflated,
    inflated,
)
from rallypoint.observe.hangs.waits import call_name, waits_for
from rallypoint.observe.stacks import MAX_FRAMES, calls_of, main_frames, waits_for_children

TIMEOUT = 10.0
"""Seconds for the stacks of all workers on a node."""
_MAX_LINE = 1000
_AT_ONCE = 16
"""How many workers to read at the same time."""
MAX_STACK = 256 * 1024
"""Maximum number of characters of one worker's stacks."""


class WorkerStacks(msgspec.Struct, frozen=True):
    """One worker's stacks, by global rank: a text of all its threads, or the reason why there is none."""

    rank: int
    pid: int
    text: str
    error: str = ""
    waits: str = ""
    """What its main thread is waiting for, if known."""


class _SentStacks(msgspec.Struct, frozen=True, array_like=True):
    """Workers whose main threads have the same stack, as (rank, pid); the text is the first one's."""

    workers: tuple[tuple[int, int], ...]
    text: str
    error: str = ""


_decoder = msgspec.json.Decoder(tuple[_SentStacks, ...])


def stacks_of(pids: Mapping[int, int]) -> bytes:
    return encode_stacks(stacks_of_workers(pids))


def encode_stacks(workers: Sequence[WorkerStacks]) -> bytes:
    """Encode stacks for an operator, each text only once."""
    alike: dict[object, list[WorkerStacks]] = {}
    for worker in workers:
        alike.setdefault((calls_of(main_frames(worker.text)), worker.error), []).append(worker)
    sent = [
        _SentStacks(tuple((worker.rank, worker.pid) for worker in all_), all_[0].text, all_[0].error)
        for all_ in alike.values()
    ]
    return deflated(msgspec.json.encode(sent))


def stacks_of_workers(pids: Mapping[int, int], deadline: Deadline | None = None) -> list[WorkerStacks]:
    """Read the stacks of workers (pid by global rank) concurrently until `deadline` (default: `TIMEOUT` from now);
    return them by rank.
    """
    if not pids:
        return []
    program, deadline = _program(), deadline or Deadline.after(TIMEOUT)
    with ThreadPoolExecutor(min(len(pids), _AT_ONCE), "stacks") as pool:
        return list(pool.map(lambda entry: _stacks_of_one(program, deadline, *entry), sorted(pids.items())))


def decode_stacks(data: bytes) -> Sequence[WorkerStacks]:
    """Decode stacks. Raises ValueError if the bytes are malformed."""
    return check_stacks(inflated(data))


def check_stacks(data: bytes) -> Sequence[WorkerStacks]:
    """Like `decode_stacks`, for uncompressed bytes."""
    sent = decoded(_decoder, data)
    stacks = []
    for group in sent:
        text = "\n".join(printable(line, _MAX_LINE) for line in group.text[:MAX_STACK].split("\n"))
        stacks += [WorkerStacks(rank, pid, text, printable(group.error)) for rank, pid in group.workers]
    return stacks


def _program() -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def text_of(threads: Sequence[PythonThread], pid: int) -> str:
    """Format stacks like py-spy, main thread first."""
    lines = [f"Process {pid}"]
    for thread in threads:
        name = '"MainThread"' if thread is threads[0] else f'"{_thread_name(pid, thread.native_id)}"'
        lines.append(f"Thread {thread.native_id}: {name}")
        lines += (f"    {frame.function} ({frame.file}:{frame.line})" for frame in thread.frames)
    return "\n".join(lines)[:MAX_STACK]


def _thread_name(pid: int, thread: int) -> str:
    return printable(_read(pid, thread, "comm").strip())


def _stacks_of_one(program: str | None, deadline: Deadline, rank: int, pid: int) -> WorkerStacks:
    try:
        threads = read_python(pid)
        return WorkerStacks(rank, pid, text_of(threads, pid), waits=waits_for(pid, threads[0]))
    except Unreadable as error:
        if program is None or not isinstance(error, UnknownPython):
            advice = "; py-spy might read them (pip install py-spy)" if isinstance(error, UnknownPython) else ""
            return WorkerStacks(rank, pid, "", f"{error}{advice}")
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline.remaining()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return WorkerStacks(rank, pid, "", f"py-spy did not answer within {TIMEOUT:g} s")
    except OSError as error:
        return WorkerStacks(rank, pid, "", f"py-spy cannot be started: {error.strerror or error}")
    if done.returncode == 0:
        return WorkerStacks(rank, pid, done.stdout[:MAX_STACK])
    return WorkerStacks(rank, pid, "", _failure_reason(done.stderr))


def _failure_reason(output: str) -> str:
    if "ermission denied" in output or "not permitted" in output:
        return (
            "the kernel does not allow reading the process; grant the agent CAP_SYS_PTRACE, or set "
            "kernel.yama.ptrace_scope=0"
        )
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "py-spy failed without a message"


log = get_logger(__name__)

_MOST_FILES = 100
"""Maximum number of evidence files per folder."""


class ExaminedWorker(NamedTuple):
    """A worker on this node. `exit_code` is None while it runs; `recorder` is how to ask its flight recorder; `note` is
    a remark by its agent.
    """

    rank: int
    pid: int
    exit_code: int | None = None
    recorder: Recorder | None = None
    note: str = ""


class ExaminedNode(NamedTuple):
    """This node as its agent's loop knows it. All evidence is saved in `folder`; empty for nowhere. `ends_workers`: the
    workers are ended after the collection.
    """

    host: str
    workers: tuple[ExaminedWorker, ...]
    folder: str = ""
    ends_workers: bool = False


def collect_evidence(node: ExaminedNode) -> NodeEvidence:
    """Examine the workers on this node. Takes as long as py-spy and the flight recorders, at most ten seconds."""
    deadline = Deadline.after(TIMEOUT)
    running = {worker.rank: worker.pid for worker in node.workers if worker.exit_code is None and worker.pid > 0}
    recorders = {worker.rank: worker.recorder for worker in node.workers if worker.rank in running and worker.recorder}
    with ThreadPoolExecutor(1, "evidence") as beside:
        dumps = beside.submit(take_dumps, recorders, dump_folder(node.folder))
        stacks = {worker.rank: worker for worker in stacks_of_workers(running, deadline)}
        evidence_of = {worker.rank: _rank_evidence(worker, stacks.get(worker.rank)) for worker in sorted(node.workers)}
        waiting = {rank: pid for rank, pid in running.items() if waits_for_children(calls_of(evidence_of[rank].frames))}
        children = children_of(waiting, deadline)
        records = tuple(dumps.result())
    ranks = tuple(
        msgspec.structs.replace(evidence, children=tuple(child.found for child in children.get(rank, ())))
        for rank, evidence in evidence_of.items()
    )
    path = _write_evidence(node.folder, _whole_text(ranks, stacks, children)) if node.folder else ""
    written = next(
        (recorder.dump.removesuffix(f"{rank}") for rank, recorder in recorders.items() if _is_there(recorder.dump)), ""
    )
    where = printable(written, MAX_TEXT)
    return NodeEvidence(printable(node.host), ranks, printable(path, MAX_TEXT), records, where, node.ends_workers)


def _is_there(path: str) -> bool:
    return bool(path) and os.path.exists(path)


def dump_folder(attempt: str) -> str:
    """The folder for flight recorders' dumps; empty if the workers' output has no folder."""
    return os.path.join(attempt, "flight_recorder") if attempt else ""


def _rank_evidence(worker: ExaminedWorker, stack: WorkerStacks | None) -> RankEvidence:
    if stack is None:
        return RankEvidence(worker.rank, "ended", worker.exit_code, note=printable(worker.note, MAX_TEXT))
    state = process_state(worker.pid)
    frames = main_frames(stack.text)[:MAX_FRAMES]
    why = "" if frames else stack.error or "no Python was found in it"
    return RankEvidence(
        worker.rank,
        state.name,
        where=printable(state.where, MAX_TEXT),
        kernel=state.kernel,
        frames=frames,
        why_none=printable(why, MAX_TEXT),
        note=printable("; ".join(filter(None, (worker.note, stack.waits))), MAX_TEXT),
    )


def _whole_text(
    ranks: Sequence[RankEvidence], stacks: Mapping[int, WorkerStacks], children: Mapping[int, Sequence[Child]]
) -> str:
    lines: list[str] = []
    for evidence in ranks:
        state = (
            evidence.state if evidence.exit_code is None else f"{evidence.state} with exit code {evidence.exit_code}"
        )
        lines.append(f"== rank {evidence.rank}: {state}{f' ({evidence.where})' if evidence.where else ''}")
        lines += ["kernel stack:", *(f"    {line}" for line in evidence.kernel)] if evidence.kernel else []
        stack = stacks.get(evidence.rank)
        lines += [stack.text.rstrip() or f"no stacks: {evidence.why_none}"] if stack is not None else []
        for child in children.get(evidence.rank, ()):
            lines += [
                "",
                f"-- process {child.pid} below rank {evidence.rank}: {child.found.state} ({child.found.where})",
            ]
            lines += [child.text.rstrip() or "no stacks"]
        lines.append("")
    return "\n".join(lines)


def _write_evidence(folder: str, text: str) -> str:
    try:
        os.makedirs(folder, exist_ok=True)
        for number in range(_MOST_FILES):
            path = os.path.join(folder, f"hang.{number}.txt")
            with suppress(FileExistsError), open(path, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
                return os.path.abspath(path)
    except OSError as error:
        log.warning("the evidence of the hang cannot be saved in %s: %s", folder, error.strerror or error)
    return ""


# Processes below a worker


_HELPERS = ("multiprocessing/resource_tracker.py", "multiprocessing/forkserver.py")
"""Where Python's own helper processes wait; these are ignored."""


class Child(NamedTuple):
    """A process below a worker: the evidence to send, and its full stacks."""

    pid: int
    found: ProcessEvidence
    text: str


def children_of(workers: Mapping[int, int], deadline: Deadline) -> dict[int, list[Child]]:
    """Examine the first `MAX_CHILDREN` processes below each worker (by rank), until `deadline`."""
    if not workers:
        return {}
    below = {rank: _descendants(pid)[:MAX_CHILDREN] for rank, pid in workers.items()}
    every = {pid: pid for pids in below.values() for pid in pids}
    texts = {process.pid: process for process in stacks_of_workers(every, deadline)}
    children_by_rank = {rank: [_child(pid, texts[pid].text) for pid in pids] for rank, pids in below.items()}
    return {rank: [child for child in children if not _is_helper(child)] for rank, children in children_by_rank.items()}


def _descendants(root: int) -> list[int]:
    try:
        table = process_table()
    except OSError:  # no descriptor is free
        return []
    pids, parents = [], {root}
    while parents:
        parents = {pid for pid, entry in table.items() if entry.parent in parents and not entry.ended}
        pids += sorted(parents)
    return pids


def _child(pid: int, text: str) -> Child:
    state = process_state(pid)
    frames = main_frames(text)[:MAX_CHILD_FRAMES]
    return Child(pid, ProcessEvidence(state.name, printable(state.where, MAX_TEXT), frames), text)


def _is_helper(child: Child) -> bool:
    frames = child.found.frames
    return bool(frames) and frames[0].file.endswith(_HELPERS)


# Information from the kernel


STATES = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "Z": "a zombie",
    "X": "ended",
}
"""The names of states, by their letters in /proc/PID/stat."""
GONE = "gone"
_MOST_THREADS = 4096
_MOST_STACK = 32
"""Maximum number of lines of a kernel stack."""


class ProcessState(NamedTuple):
    """A process as the kernel shows it. `where` is its place in the kernel, empty if none or unreadable. `kernel` is
    its kernel stack, read only in uninterruptible sleep.
    """

    name: str
    where: str = ""
    kernel: tuple[str, ...] = ()


def process_state(pid: int) -> ProcessState:
    """The state of a process: that of its main thread, or of a thread in uninterruptible sleep."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState(GONE)
    if stat.state == "Z" and not stat.ended:
        return ProcessState("running without its main thread, which has ended")
    if stat.ended:
        return ProcessState(STATES["Z"])
    if stat.state != "D" and (thread := next(_uninterruptible(pid), 0)):
        name = f"{STATES.get(stat.state, stat.state)}, its thread {thread} {STATES['D']}"
        return ProcessState(name, _wait_place(pid, thread), _kernel_stack(pid, thread))
    name = STATES.get(stat.state, printable(stat.state))
    if stat.state in "Tt":
        return ProcessState(name)  # it waits for a signal; its place is irrelevant
    return ProcessState(name, _wait_place(pid, pid), _kernel_stack(pid, pid) if stat.state == "D" else ())


def _uninterruptible(pid: int) -> Iterator[int]:
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:_MOST_THREADS]
    except (OSError, ValueError):
        return
    for thread in threads:
        stat = read_stat(thread)
        if thread != pid and stat is not None and stat.state == "D":
            yield thread


def _wait_place(pid: int, thread: int) -> str:
    place = _read(pid, thread, "wchan").strip("0\n")
    number = _read(pid, thread, "syscall").partition(" ")[0]
    names = (place, call_name(number) or number if number.isdigit() else "")
    return ", ".join(printable(name) for name in names if name)


def _kernel_stack(pid: int, thread: int) -> tuple[str, ...]:
    lines = (line.rpartition(" ")[2] for line in _read(pid, thread, "stack").splitlines())
    return tuple(printable(line) for line in lines if line)[:_MOST_STACK]


def _read(pid: int, thread: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/task/{thread}/{name}", "rb") as file:
            return file.read(8192).decode(errors="replace")
    except OSError:
        return ""
