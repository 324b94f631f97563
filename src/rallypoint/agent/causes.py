"""Finds which failure of a job caused the others, before one is announced.

Workers A and B of this node are in a collective:

  1. B raises and starts to shut down: `finally`, atexit, threads, destruction of its process group;
  2. B closes its connection, so A's collective fails, and A ends first;
  3. if the agent announced A's failure, the report would show a closed connection, and B would be stopped before it
     could write its traceback.

So the agent holds back a failure that might be a consequence of another one (`failures.kinds`) for half a second, and
waits for an original. Meanwhile it repeatedly inspects each worker that is still running:

- it wrote an error file in this start: it failed;
- its last output is a whole traceback: it failed, and is shutting down or waiting for a thread;
- it is handling an exception that is no consequence (`base.python_memory`): it failed, and is cleaning up;
- otherwise its stack is a clue: it shows where the worker was when the others failed.

The agent also asks all other nodes to look. A node that finds an original announces it at once, which ends the round
for all. The others answer with their clues. An ordinary failure is announced without delay, and without these imports.

A thread reads the workers' memory, because a worker in the middle of a large `munmap` can block its reader.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping

from rallypoint.agent.facts import attempt_folder
from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger, printable
from rallypoint.base.side_thread import start_thread
from rallypoint.control.protocol.messages import CauseClues, CauseSought
from rallypoint.control.protocol.ranges import MOST_ANSWERS
from rallypoint.failures.failure import NO_FILE, ProcessFailure
from rallypoint.failures.kinds import is_consequence_text, may_be_consequence
from rallypoint.failures.report import rank_list
from rallypoint.failures.tracebacks import clean_lines, is_last_traceback

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController
    from rallypoint.base.python_memory import HandledException, PythonThread
    from rallypoint.failures.cause import Cause
    from rallypoint.workers.context import PContext

log = get_logger(__name__)

_WITHIN, _LOOKS_AGAIN = 0.5, 0.05
"""Seconds to wait for an original failure, and between inspections of running workers."""
_FOR_CLUES = 0.5
"""Additional seconds to wait for other nodes' answers, on the node that asked."""
_OTHERS_FIRST = 0.8
"""Additional seconds to wait on a node that was asked: the node that asked announces first, with all clues."""
_SHOWN = 12
"""Maximum number of worker groups that the report names."""
_MOST_RANKS = 64
"""Maximum number of ranks sent per group."""
_USUAL = re.compile(
    "(?:Stop(?:Async)?Iteration|GeneratorExit|ImportError|ModuleNotFoundError|AttributeError|KeyError|IndexError|Empty|Full"
    "|FileNotFoundError|FileExistsError|BlockingIOError|InterruptedError|NotImplementedError|TimeoutError"
    "|KeyboardInterrupt|SystemExit)"
)
"""Exceptions that programs routinely catch: a worker in an `except` block for one of these has not failed."""
_STILL = "still in "
"""Start of the clue from a worker that is still running."""
Clues = list[tuple[str, tuple[int, ...]]]
"""Places where workers were, each with the workers' global ranks."""


def raised_failure(context: PContext, local_rank: int) -> tuple[ProcessFailure, float | None]:
    """Describe a worker's failure as if it exited with 1 now, and the seconds since it raised: it wrote an error file
    in this start, or its last output is a whole traceback. None if it has not raised.
    """
    failure, silent_for = context.failure_so_far(local_rank)
    if failure.error_file != NO_FILE:
        return failure, max(0.0, time.time() - failure.moment)
    written = (failure.last_lines, failure.last_stdout)
    raised = any(is_last_traceback(clean_lines(output)) for output in written)
    return failure, max(0.0, silent_for) if raised else None


class CauseSearch:
    """The search on one node, over all its rounds."""

    def __init__(self, workers: WorkerController) -> None:
        self._workers = workers
        self._round, self._until = -1, 0.0
        self._asked_by_other = -1
        """The last round in which another node asked."""
        self._answered = -1
        self._reading: _Reading | None = None
        self._seen: dict[int, tuple[PythonThread, ...]] | None = None
        """Threads of the workers, by local rank, as last read in this round."""
        self._clues: Clues = []
        """Other nodes' clues in this round."""
        self._awaited = 0
        """How many nodes have not sent their clues yet."""

    def hear(self, event: CauseSought | CauseClues) -> None:
        """Note that another node is looking for a cause, or where its workers were."""
        if isinstance(event, CauseSought):
            if event.round > max(self._round, self._asked_by_other):
                self._reading = self._seen = None  # from an earlier round
            self._asked_by_other = event.round
        elif event.round == self._round:
            self._clues += event.clues
            self._awaited -= 1

    def answer(self, result: RunResult, round_: int, now: float) -> tuple[RunResult, float]:
        """Look for a cause if another node asked in this round. Call it while no worker of this node has failed.

        Returns the result, with the failures of workers that are still running, and when to look again.
        """
        if not self._is_asked(round_):
            return result, math.inf
        found, looked = self._look()
        if looked is None:
            return result, now + _LOOKS_AGAIN
        if found:
            return RunResult(WorkerState.FAILED, failures=found), math.inf
        self._send_clues(round_, _clues(looked))
        return result, math.inf

    def step(self, result: RunResult, round_: int, now: float) -> tuple[Cause | None, float]:
        """Choose the cause among the failures in a result and of running workers; None while waiting for an original.
        Also returns when to look again."""
        cause = result.first_cause()
        if not may_be_consequence(cause):
            return cause, now
        others = (self._workers.group.group_world_size or 1) - 1
        if self._round != round_:
            self._round, self._until, self._clues, self._awaited = round_, now + _WITHIN, [], 0
            self._reading = self._seen = None
            if self._asked_by_other == round_:
                self._until += _OTHERS_FIRST
            elif others:
                self._awaited = min(others, MOST_ANSWERS)
                self._workers.rendezvous.send(CauseSought(round_))
        found, looked = self._look()
        if looked is None and now < self._until:
            return None, now + _LOOKS_AGAIN
        result.failures |= found
        cause = result.first_cause()
        if not may_be_consequence(cause):
            return cause, now
        if looked is not None and self._is_asked(round_):
            self._send_clues(round_, [*_failed_clues(result.failures), *_clues(looked)])
        until = self._until + (_FOR_CLUES if self._awaited > 0 else 0.0)
        if now < until and (others or self._workers.running()):
            return None, min(now + _LOOKS_AGAIN, until)
        self._add_clues(result.failures, [*_clues(looked or {}), *self._clues])
        return result.first_cause(), now

    def _is_asked(self, round_: int) -> bool:
        return self._asked_by_other == round_ != self._answered

    def _send_clues(self, round_: int, clues: Clues) -> None:
        self._answered = round_
        sent = tuple((text, ranks[:_MOST_RANKS]) for text, ranks in _merged(clues)[:_SHOWN])
        self._workers.rendezvous.send(CauseClues(round_, sent))

    def _look(self) -> tuple[dict[int, ProcessFailure], dict[int, PythonThread] | None]:
        """Collect the failures of workers that are still running, and the main threads of the others, by global rank.
        The threads are None until they are read."""
        context, by_rank, found = self._workers.pcontext, self._workers.global_ranks(), dict[int, ProcessFailure]()
        if context is None:
            return found, {}
        if self._reading is not None and self._reading.done:
            self._seen, self._reading = self._reading.threads, None
        if self._reading is None:
            self._reading = _Reading({rank: context.program_pids()[rank] for rank in context.running})
        for rank in context.running:
            main = next(iter((self._seen or {}).get(rank, ())), None)
            if (failure := self._living_failure(rank, main)) is not None:
                found[by_rank[rank]] = failure
        if self._seen is None:
            return found, None
        mains = ((by_rank[rank], threads[0]) for rank, threads in self._seen.items())
        return found, {rank: main for rank, main in mains if rank not in found}

    def _living_failure(self, rank: int, thread: PythonThread | None) -> ProcessFailure | None:
        """The failure of a running worker that left an exception behind or is handling one."""
        assert self._workers.pcontext is not None
        if (behind := self._workers.pcontext.failed_behind(rank)) is not None:
            return behind
        failure, ago = raised_failure(self._workers.pcontext, rank)
        if ago is not None:
            failure.moment -= ago if failure.error_file == NO_FILE else 0.0
            failure.remark = f"raised {ago:.1f} s earlier; the worker is still running{_place(thread)}"
        elif thread is not None and (exception := _original(thread.exceptions)) is not None:
            failure.message, failure.callstack = printable(exception.line), _printable_lines(exception.traceback)
            failure.remark = f"the worker is still running{_place(thread)}"
        else:
            return None
        return failure

    def _add_clues(self, failures: Mapping[int, ProcessFailure], clues: Clues) -> None:
        """Attach the clues about other workers to failures without an original."""
        by_rank, context = self._workers.global_ranks(), self._workers.pcontext
        ended = () if context is None else context.succeeded
        lines: list[str] = []
        if context is not None and ended:
            ago = time.monotonic() - max(context.ended_at(rank) for rank in ended)
            lines.append(f"{rank_list(by_rank[rank] for rank in ended)} exited with code 0, {ago:.1f} s earlier")
        own = _failed_clues(failures) if len(failures) > 1 or clues else []
        merged = _merged([*own, *clues])
        lines += (_sentence(text, ranks) for text, ranks in merged[:_SHOWN])
        if not lines:
            return
        lines.insert(0, "Another failure most likely led to this one, but its exception was not found:")
        if path := self._keep_stacks():
            lines.append(f"all stacks on this node: {path}")
        note = "\n".join(lines)
        remark = lines[1] if ended else next((_sentence(*clue) for clue in merged if clue[0].startswith(_STILL)), "")
        for failure in failures.values():
            failure.remark = failure.remark or remark
            failure.context = "\n".join(filter(None, (failure.context, note)))

    def _keep_stacks(self) -> str:
        """Start to write the stacks to a file among the logs. Returns its path, empty without logs."""
        context, by_rank = self._workers.pcontext, self._workers.global_ranks()
        folder = "" if context is None else attempt_folder(context.error_files.values())
        if not self._seen or not folder or self._workers.logs_specs.temporary:
            return ""
        path, seen = os.path.abspath(f"{folder}/stacks.txt"), {by_rank[rank]: all_ for rank, all_ in self._seen.items()}
        return path if start_thread(lambda: _write_stacks(path, seen), "rallypoint-stacks") is not None else ""


class _Reading:
    """One read of some workers' memory (pids by local rank), on its own thread."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.threads: dict[int, tuple[PythonThread, ...]] = {}
        """The threads of each readable worker, the main one first; complete once `done`."""
        self.done = False  # set before the thread starts: it may finish at once
        if start_thread(lambda: self._read(pids), "rallypoint-causes") is None:
            self.done = True

    def _read(self, pids: Mapping[int, int]) -> None:
        try:
            from rallypoint.base.python_memory import Unreadable, read_python

            for rank, pid in pids.items():
                try:
                    self.threads[rank] = read_python(pid)
                except Unreadable:  # another program, or a protected one: no clue
                    continue
        finally:
            self.done = True


def _write_stacks(path: str, ranks: Mapping[int, Iterable[PythonThread]]) -> None:
    lines: list[str] = []
    for rank, threads in ranks.items():
        for thread in threads:
            lines.append(f"rank {rank}, thread {thread.native_id}, innermost call first:")
            lines += (f"    {frame.function} ({frame.file}:{frame.line})" for frame in thread.frames)
            for exception in thread.exceptions:
                lines += ["  while handling:", *(f"    {line}" for line in exception.traceback.split("\n"))]
    try:
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write("\n".join([*lines, ""]))
    except OSError as error:
        log.warning("the workers' stacks cannot be saved in %s: %s", path, error.strerror or error)


def _original(exceptions: Iterable[HandledException]) -> HandledException | None:
    """The innermost exception that is neither a consequence nor routinely caught."""
    for exception in exceptions:
        if (exception.cleans_up or not _USUAL.fullmatch(exception.name)) and not is_consequence_text(exception.line):
            return exception
    return None


def _clues(threads: Mapping[int, PythonThread]) -> Clues:
    """Clues from workers that are still running."""
    return [(f"{_STILL}{text}", (rank,)) for rank, thread in threads.items() if (text := _summary(thread))]


def _failed_clues(failures: Mapping[int, ProcessFailure]) -> Clues:
    """Clues from workers that failed."""
    from rallypoint.failures.explanation import message_and_traceback
    from rallypoint.observe.stacks import frames_of_traceback, in_words

    places = {
        rank: in_words(frames_of_traceback(message_and_traceback(failure)[1])) for rank, failure in failures.items()
    }
    return [(f"failed in {place}", (rank,)) for rank, place in places.items() if place]


def _merged(clues: Iterable[tuple[str, tuple[int, ...]]]) -> Clues:
    """Merge equal texts and their ranks; texts with the fewest ranks first."""
    ranks_of: dict[str, set[int]] = {}
    for text, ranks in clues:
        ranks_of.setdefault(text, set()).update(ranks)
    merged = [(text, tuple(sorted(ranks))) for text, ranks in ranks_of.items()]
    return sorted(merged, key=lambda clue: (len(clue[1]), clue[1]))


def _sentence(text: str, ranks: tuple[int, ...]) -> str:
    verb = "" if not text.startswith(_STILL) else "was " if len(ranks) == 1 else "were "
    return f"{rank_list(ranks)} {verb}{text}"


def _summary(thread: PythonThread) -> str:
    from rallypoint.observe.stacks import frames_of, in_words

    return in_words(frames_of(thread.frames))


def _place(thread: PythonThread | None) -> str:
    place = "" if thread is None else _summary(thread)
    return f", in {place}" if place else ""


def _printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))
