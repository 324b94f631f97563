"""Rounds of workers that continue in their processes: shell scripts that act like `rallypoint.inprocess`."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rallypoint.base.process_table import read_stat
from rallypoint.features.inprocess.channel import ReleasedWorkers, WorkerChannel
from rallypoint.workers.context import ProcessOptions, SubprocessContext
from rallypoint.workers.logs.outputs import WorkerConsole
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import Stop
from tests.unit.workers.test_process import TIMEOUT
from tests.waiting import until

WORKER = """
exec 3<>"inprocess.$LOCAL_RANK"
sleep 1000 & echo $! > "child.$LOCAL_RANK"
sh -c 'setsid sleep 1000 & echo $! > "other.$LOCAL_RANK.new"; mv "other.$LOCAL_RANK.new" "other.$LOCAL_RANK"'
echo "up $RANK" >&2
while read verb round <&3; do
    echo "$verb $round" >&2
    if [ "$verb" = leave ]; then : > "left.$LOCAL_RANK.$round"; fi
    if [ "$verb" = end ]; then exit "$round"; fi
done
"""
"""It has a child, and an orphan in another session. After `end N` it exits with N."""


class Rounds:
    """The contexts of one round after another, with workers in one folder."""

    def __init__(self, folder: Path, reaper: ReaperClient) -> None:
        self.folder = folder
        self.reaper = reaper
        self.channel = WorkerChannel(str(folder))
        self.specs = DefaultLogsSpecs(str(folder / "logs"), tee=Std.ERR)
        self.console = WorkerConsole()
        self.contexts: list[SubprocessContext] = []

    def make(self, ranks: Mapping[int, int]) -> SubprocessContext:
        """The context of the next round; `ranks` maps local ranks to global ranks."""
        envs = {
            local: {
                "LOCAL_RANK": str(local),
                "RANK": str(rank),
                "TORCHELASTIC_RESTART_COUNT": str(len(self.contexts)),
                f"OF_{len(self.contexts)}": "",
            }
            for local, rank in ranks.items()
        }
        args = dict.fromkeys(ranks, ("-c", WORKER))
        prefixes = {local: f"[rank{rank}]:" for local, rank in ranks.items()}
        options = ProcessOptions(console=self.console)
        return SubprocessContext("group", "sh", args, envs, self.specs, prefixes, self.reaper, options)

    def begin(self, ranks: Mapping[int, int]) -> SubprocessContext:
        """Begin a round with new workers."""
        context = self.make(ranks)
        self.start(context, set(ranks))
        return context

    def start(self, context: SubprocessContext, new: Collection[int]) -> None:
        """Start the new workers of a round."""
        for local in new:
            os.mkfifo(self.folder / f"inprocess.{local}")
            for name in ("child", "other"):
                (self.folder / f"{name}.{local}").unlink(missing_ok=True)
        self.contexts.append(context)
        context.start()
        until(lambda: all((self.folder / f"other.{local}").exists() for local in new))
        until(lambda: all(b"up" in context.last_lines(local)() for local in new))

    def end(self, ranks: tuple[int, ...], timeout: float = TIMEOUT) -> Stop:
        """Begin to end the last round, which these workers shall leave."""
        context = self.contexts[-1]
        leaving = ReleasedWorkers(self.channel, ranks, len(self.contexts) - 1)
        return context.begin_close(signal.SIGTERM, TIMEOUT, leaving=leaving, leaving_time=timeout)

    def pid(self, name: str) -> int:
        return int((self.folder / name).read_text())


def waiting(context: SubprocessContext) -> set[int]:
    """Local ranks of the waiting workers."""
    return set(context.held)


def runs(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    stat = read_stat(pid)
    return stat is not None and not stat.ended


@contextmanager
def rounds_in(folder: Path, reaper: ReaperClient) -> Iterator[Rounds]:
    """Rounds of workers in a folder, which must be the current one. All workers are killed at the end."""
    rounds = Rounds(folder, reaper)
    try:
        yield rounds
    finally:
        for context in rounds.contexts:
            context.close(signal.SIGKILL)
        rounds.console.close()
