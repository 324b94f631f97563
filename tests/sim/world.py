"""Virtual time, and the processes that live in it.

Laws:

1. Everything that happens is an event of the one heap; two events of one moment happen in the order in which they were
   planned. Nothing here depends on hashes, addresses or the real time.
2. A process reads only its own clock, which started at a different time than every other process's.
3. A paused process does nothing. Messages to it wait meanwhile, and so do its timers.
4. A dead process never does anything again.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

Call = Callable[..., None]


class Violation(Exception):
    """Something that must never happen has happened. `rule` names what was broken, the same for every seed."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


_MOST_STEPS = 100_000
"""No run needs more; one that does goes round in circles."""


class Timer:
    """Something that is to happen; `cancel` it and it will not."""

    __slots__ = ("args", "call", "owner")

    def __init__(self, call: Call, args: tuple[Any, ...], owner: Process | None = None) -> None:
        self.call: Call | None = call
        self.args = args
        self.owner = owner
        """Whose timer it is; None for what happens by itself."""

    def cancel(self) -> None:
        """It shall not happen. Idempotent."""
        self.call = None


class World:
    """The heap of events and the trace."""

    def __init__(self, *, tracing: bool = False) -> None:
        self.now = 0.0
        self.steps = 0
        self.ports = 0
        self.admitted: dict[int, list[str] | None] = {}
        """Who may connect to the worker stores on these ports, of those whose hosts have said; None for all."""
        self.tracing = tracing
        self.trace: list[str] = []
        self._heap: list[tuple[float, int, Timer]] = []
        self._planned = 0

    def at(self, moment: float, call: Call, *args: Any) -> Timer:
        """Plan something for a moment of the true time."""
        timer = Timer(call, args)
        self.plan(moment, timer)
        return timer

    def plan(self, moment: float, timer: Timer) -> None:
        """Plan something."""
        self._planned += 1
        heappush(self._heap, (moment, self._planned, timer))

    def after(self, delay: float, call: Call, *args: Any) -> Timer:
        """Plan something for `delay` seconds from now."""
        return self.at(self.now + delay, call, *args)

    def run(self, until: float) -> None:
        """Let things happen until the heap is empty or the time is over."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, timer = heappop(heap)
            call = timer.call
            if call is not None:
                self.steps += 1
                if self.steps > _MOST_STEPS:
                    raise Violation("things go round in circles", f"at {self.now:.6f} s: {call} {timer.args}")
                if timer.owner is None:
                    call(*timer.args)
                else:
                    timer.owner.fire(timer)

    def note(self, who: object, text: str, *args: object) -> None:
        """A line of the trace, put together only if there is one."""
        if self.tracing:
            self.trace.append(f"{self.now:9.4f}  {who!s:<8}  {text % args if args else text}")


class Process:
    """Something with a clock that can be paused and killed."""

    def __init__(self, world: World, name: str, rng: Random) -> None:
        self.world = world
        self.name = name
        self.rng = rng
        self.alive = True
        self.paused = False
        self.paused_at = 0.0
        self.resumed_at = 0.0
        self._offset = rng.uniform(0.0, 1e6)
        self._input: list[tuple[Call, tuple[Any, ...]]] = []
        self._due: list[Timer] = []

    def __str__(self) -> str:
        return self.name

    def monotonic(self) -> float:
        """Seconds on this process's own monotonic clock."""
        return self.world.now + self._offset

    def later(self, delay: float, call: Call, *args: Any) -> Timer:
        """A timer of this process."""
        timer = Timer(call, args, self)
        self.world.plan(self.world.now + delay, timer)
        return timer

    def fire(self, timer: Timer) -> None:
        """The timer's moment has come."""
        if self.paused:
            self._due.append(timer)
        elif self.alive and timer.call is not None:
            timer.call(*timer.args)

    def hears(self, call: Call, *args: Any) -> None:
        """Something reaches this process from outside."""
        if self.paused:
            self._input.append((call, args))
        elif self.alive:
            call(*args)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True
        self.paused_at = self.world.now

    def resume(self) -> None:
        """SIGCONT: what waited happens now. Whether timers or input come first is up to the event loop below."""
        self.paused = False
        self.resumed_at = self.world.now
        due, self._due = self._due, []
        waiting, self._input = self._input, []
        calls: list[Call] = [lambda: self._run_due(due), lambda: self._run_input(waiting)]
        if self.rng.random() < 0.5:
            calls.reverse()
        for call in calls:
            call()

    def _run_due(self, due: list[Timer]) -> None:
        for timer in due:
            self.fire(timer)

    def _run_input(self, waiting: list[tuple[Call, tuple[Any, ...]]]) -> None:
        for call, args in waiting:
            self.hears(call, *args)

    def kill(self) -> None:
        """SIGKILL: nothing of this process happens any more."""
        self.alive = False
        self.paused = False
        self._due.clear()
        self._input.clear()
