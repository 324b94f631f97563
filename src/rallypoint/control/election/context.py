"""The context of a step of the election: its time, effects, watches, and the procedure in progress. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rallypoint.base.errors import RallypointError
from rallypoint.control.election.steps import (
    DEBUG,
    WARNING,
    Answered,
    Ask,
    Chore,
    Effect,
    EndWatch,
    EtcdTrouble,
    Failed,
    Procedure,
    Request,
    Watched,
    WatchKeys,
    WriteLog,
)

_WARN_INTERVAL = 300.0
"""Seconds until the log says again what is wrong with etcd, for weeks perhaps."""


class StepContext:
    """The time of a step and its effects, in order. Repeats no complaint."""

    def __init__(self) -> None:
        self.now = 0.0
        """When this step's event happened, in seconds on a monotonic clock."""
        self._effects: list[Effect] = []
        self._watches: dict[Watched, int] = {}
        self._count = 0
        self._trouble = ""
        self._warned_of: tuple[type[Exception], float] | None = None
        """The last problem that was logged, and until when it is not logged again."""

    def add(self, effect: Effect) -> None:
        """One more."""
        self._effects.append(effect)

    def pop_effects(self) -> list[Effect]:
        """All since the last time."""
        taken, self._effects = self._effects, []
        return taken

    def log(self, level: int, text: str, *args: object) -> None:
        """A line of the log; `level` as `logging` has it."""
        self.add(WriteLog(level, text, args))

    # Watches: one of each kind at most

    def watch(self, kind: Watched, key: bytes, revision: int, *, prefix: bool = False) -> None:
        """Watch from after that revision on, instead of what was watched before."""
        self.unwatch(kind)
        self._count += 1
        self._watches[kind] = self._count
        self.add(WatchKeys(kind, self._count, key, revision + 1, prefix))

    def unwatch(self, kind: Watched) -> None:
        """End the watch of that kind, if it is on."""
        if self._watches.pop(kind, None) is not None:
            self.add(EndWatch(kind))

    def unwatch_all(self) -> None:
        """End all watches that are on."""
        for kind in list(self._watches):
            self.unwatch(kind)

    def watched(self, number: int) -> Watched | None:
        """The kind of the watch with that number; None if it has ended."""
        return next((kind for kind, each in self._watches.items() if each == number), None)

    def has_ended(self, kind: Watched) -> None:
        """The watch of that kind has ended on its own."""
        del self._watches[kind]

    def watches(self, kind: Watched) -> bool:
        """Whether that is watched."""
        return kind in self._watches

    # Complaints

    def trouble(self, sentence: str) -> None:
        """Why etcd cannot be asked; "" when it could be."""
        if sentence != self._trouble:
            self._trouble = sentence
            self.add(EtcdTrouble(sentence))

    def warn(self, error: Exception, what: str) -> None:
        """Log a problem, from time to time; with a traceback if it is unexpected."""
        if self._warned_of is not None and self._warned_of[0] is type(error) and self.now < self._warned_of[1]:
            self.log(DEBUG, "%s: %s", what, error)
            return
        self._warned_of = type(error), self.now + _WARN_INTERVAL
        unforeseen = None if isinstance(error, RallypointError) else error
        self.add(WriteLog(WARNING, "%s: %s", (what, error), unforeseen))


class _Running(NamedTuple):
    """The procedure that waits for the answer to the request of that number; which chore it is, if it is one."""

    number: int
    procedure: Procedure[None]
    chore: Chore | None


class Runner:
    """The procedure in progress, if there is one; between two of its requests, one that cannot wait for its end."""

    def __init__(
        self,
        context: StepContext,
        on_failure: Callable[[Exception, Chore | None], None],
        urgent: Callable[[], tuple[Procedure[None], Chore] | None],
    ) -> None:
        """Nothing is in progress.

        Args:
            context: takes the requests.
            on_failure: called when a procedure has ended in an error; it may begin another.
            urgent: returns the chore that is due and cannot wait for the end of the procedure in progress, if any.
        """
        self._context = context
        self._on_failure = on_failure
        self._urgent = urgent
        self._running: _Running | None = None
        self._held: tuple[_Running, Answered | Failed] | None = None
        """A procedure whose next request waits for an urgent chore, and the answer with which it continues."""
        self._asked = 0

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return self._running is not None

    def begin(self, procedure: Procedure[None], chore: Chore | None = None) -> None:
        """Begin this procedure instead of the one in progress."""
        self.drop()
        self._take(procedure, chore, lambda: next(procedure))

    def drop(self) -> None:
        """Drop what is in progress; a late answer is ignored."""
        self._running = self._held = None

    def go_on(self, event: Answered | Failed) -> None:
        """The request of that number is done, or could not be."""
        running = self._running
        if running is None or running.number != event.number:
            return
        if self._held is None and running.chore is None and (urgent := self._urgent()) is not None:
            self._held, (procedure, chore) = (running, event), urgent
            self._take(procedure, chore, lambda: next(procedure))
            return
        self._resume(running, event)
        if not self.busy and self._held is not None:
            held, self._held = self._held, None
            self._resume(*held)

    def _resume(self, running: _Running, event: Answered | Failed) -> None:
        if isinstance(event, Answered):
            self._take(running.procedure, running.chore, lambda: running.procedure.send(event.answer))
        else:
            self._take(running.procedure, running.chore, lambda: running.procedure.throw(event.error))

    def _take(self, procedure: Procedure[None], chore: Chore | None, resume: Callable[[], Request]) -> None:
        self._running = None
        try:
            request = resume()
        except StopIteration:
            if chore is not None:
                self._context.trouble("")
        except Exception as error:
            self._on_failure(error, chore)
        else:
            self._asked += 1
            self._running = _Running(self._asked, procedure, chore)
            self._context.add(Ask(self._asked, request))
