"""Runs procedures, one at a time: each request is asked for, its answer sent back, its error thrown in. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rallypoint.election.context import StepContext
from rallypoint.election.steps import Answered, Ask, Chore, Failed, Procedure, Request


class _Running(NamedTuple):
    """The procedure that waits for the answer to the request of that number; which chore it is, if it is one."""

    number: int
    procedure: Procedure[None]
    chore: Chore | None


class Runner:
    """The procedure that is under way, if there is one."""

    def __init__(self, context: StepContext, on_failure: Callable[[Exception, Chore | None], None]) -> None:
        """`on_failure` is called when a procedure has ended in an error; it may begin another."""
        self._context = context
        self._on_failure = on_failure
        self._running: _Running | None = None
        self._asked = 0

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return self._running is not None

    def begin(self, procedure: Procedure[None], chore: Chore | None = None) -> None:
        """Go on with that instead of what was under way."""
        self._take(procedure, chore, lambda: next(procedure))

    def drop(self) -> None:
        """Forget what is under way; its answer, should it come, means nothing."""
        self._running = None

    def go_on(self, event: Answered | Failed) -> None:
        """The request of that number is done, or could not be."""
        running = self._running
        if running is None or running.number != event.number:
            return
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
