"""A snapshot of a node and its workers, for health checks, metrics, bundles and hang reports.

Law: the snapshot is taken on the loop's thread and never changes, so any thread can read it. Facts that need files are
functions for such a thread, because the disk might hang (`output_ages`, `last_lines`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rallypoint.agent.spec import Worker
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.workers.context import PContext


class WorkerFacts(NamedTuple):
    """One worker. `added` is its environment beyond the agent's. `last_lines` returns the end of its standard error if
    that goes to no file."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    """None while the worker is running, as far as known."""
    stdout: str
    stderr: str
    error_file: str
    added: Mapping[str, str]
    last_lines: Callable[[], bytes]


class WaitingProcess(NamedTuple):
    """A process waiting for a place in a round. `prepared`: whether it can take a place at once."""

    pid: int
    prepared: bool


class NodeFacts(NamedTuple):
    """This node, as its agent's loop sees it. `since` is when its workers were started, in seconds since 1970."""

    job: str
    role: str
    state: str
    round: int
    host: str
    pid: int
    group_rank: int
    group_world_size: int
    restarts: int
    remaining: int
    """How many more failures the job would survive."""
    since: float
    program: str
    workers: tuple[WorkerFacts, ...]
    processes: tuple[WorkerFacts, ...]
    """Workers with processes: empty before the processes start."""
    running: frozenset[int]
    """Local ranks of the workers that are still running."""
    failures: Mapping[int, ProcessFailure]
    """By global rank."""
    output_ages: Callable[[], tuple[float, ...]]
    """Returns the seconds since each worker's last output, by local rank, -1 if unknown; reads log files."""
    waiting: tuple[WaitingProcess, ...] = ()

    @property
    def attempt_folder(self) -> str:
        """Folder of this start of the workers; empty if their output goes to no folder."""
        return attempt_folder(worker.error_file for worker in self.processes)

    def status(self) -> Mapping[str, object]:
        """The content of the health check."""
        return {
            "run_id": self.job,
            "role": self.role,
            "state": self.state,
            "round": None if self.round < 0 else self.round,
            "restarts": self.restarts,
            "remaining_restarts": self.remaining,
            "group_rank": None if self.group_rank < 0 else self.group_rank,
            "group_world_size": self.group_world_size or None,
            "workers": [
                {"local_rank": worker.local_rank, "global_rank": worker.rank, "pid": worker.pid or None}
                for worker in self.workers
            ],
        }


def attempt_folder(error_files: Iterable[str]) -> str:
    """Folder of the start that these error files belong to; empty if there is none."""
    paths = (path for path in error_files if path and path != os.devnull)
    return os.path.dirname(os.path.dirname(next(paths, "")))


def worker_facts(worker: Worker, context: PContext | None, codes: Mapping[int, int]) -> WorkerFacts:
    """The facts about one worker, whose process is in `context`; `codes` are the exit codes of ended workers."""
    rank, pid = worker.local_rank, worker_pid(worker, context)
    if context is None:
        return WorkerFacts(worker.global_rank, rank, pid, None, "", "", "", {}, bytes)
    return WorkerFacts(
        worker.global_rank,
        rank,
        pid,
        codes.get(rank),
        context.stdouts.get(rank, ""),
        context.stderrs.get(rank, ""),
        context.error_files.get(rank, ""),
        context.envs[rank],
        context.last_lines(rank),
    )


def worker_pid(worker: Worker, context: PContext | None) -> int:
    """The process that runs a worker's program; 0 if none was started."""
    pid = 0 if context is None else context.program_pid(worker.local_rank)
    return pid or (worker.id if isinstance(worker.id, int) else 0)
