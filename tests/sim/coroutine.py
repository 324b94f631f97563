"""A waiting thread in virtual time: a generator, which yields what it waits for and receives the result.

So a mirror of blocking code has the shape of that code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any, TypeAlias, TypeVar

from tests.sim.world import Process

Resume = Callable[[object], None]
Begin = Callable[[Resume], None]
"""Begins to wait; what it is given is to be called once, later, with what came: an exception is raised there."""

T = TypeVar("T")
Steps: TypeAlias = Generator[Begin, Any, T]

SOON = 1e-4
"""A timer needs some time: with none at all, a moment that is missed by a rounding error never comes."""


class SimThread:
    """One thread of a process, from its first step to its last."""

    def __init__(self, process: Process, steps: Steps[None]) -> None:
        self._steps = steps
        self.running = True
        process.later(0.0, self._go, None)

    def _go(self, came: object) -> None:
        try:
            begin = self._steps.throw(came) if isinstance(came, Exception) else self._steps.send(came)
        except StopIteration:
            self.running = False
            return
        begin(OneShot(self._go))


class OneShot:
    """Calls what it stands for the first time that it is called."""

    __slots__ = ("_resume",)

    def __init__(self, resume: Resume) -> None:
        self._resume: Resume | None = resume

    def __call__(self, came: object = None) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume(came)


class SimEvent:
    """What those wait on who are told when there is something to look at: a condition."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: list[Resume] = []

    def set(self) -> None:
        """Wake all who wait."""
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            self._process.later(0.0, resume)

    def wait(self, seconds: float = inf) -> Begin:
        """Wait for the event, or for so many seconds."""

        def begin(resume: Resume) -> None:
            self._waiting.append(resume)
            if seconds < inf:
                self._process.later(max(SOON, seconds), resume)

        return begin
