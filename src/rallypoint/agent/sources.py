"""Sources, which the agent's loop waits for and drives, and watchers, which only watch it. Cheap to import.

Laws of watchers (`Watchers`, `Observer`):

1. If a watcher raises, the exception is logged, the watcher is dropped, and the job continues.
2. A watcher reads memory only. Work that might wait for a disk, a console or a program is posted to a thread
   (`base.side_thread`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.light_typing import TYPE_CHECKING, Any, ParamSpec, Protocol
from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    from signal import Signals

    from rallypoint.agent.facts import WaitingProcess
    from rallypoint.agent.policy import PolicyState
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.agent.steps import Event, NodeChecked, Step, WorkersStopped
    from rallypoint.control.membership.state import NodeInfo
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.workers.context import PContext, ProcessOptions
    from rallypoint.workers.stop import Stop


log = get_logger(__name__)

P = ParamSpec("P")


def guarded(what: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
    """Call code that only watches the job, and log its exception. Returns whether it succeeded."""
    try:
        call(*args, **kwargs)
    except Exception:
        log.exception("%s failed; the job continues without it. This is a bug in Rallypoint (please report it)", what)
        return False
    return True


class Source(Protocol):
    """Something that the loop waits for and drives. Nothing here blocks."""

    def fds(self) -> Iterable[int]:
        """Descriptors that become readable when the source has work to do."""
        return ()

    def wake_at(self) -> float:
        """When the next work is due, in seconds on the monotonic clock; infinite for never."""
        return math.inf

    def step(self) -> Iterable[Event] | None:
        """Do what is due."""
        return ()


class Preparation(Source, Protocol):
    """Work that must be done, possibly with other nodes, before a round's workers can start."""

    failure: str = ""
    """A sentence on why the workers cannot start; empty if nothing failed."""
    failed_node: str = ""
    """The name of the node that failed; empty for this one."""
    ends_job: bool = False
    """Whether the failure ends the job even if restarts are left."""

    def begin(self, group: WorkerGroup) -> None:
        """Begin for a round that the node entered, with the group's place in it. Drops work in progress."""

    def preparing(self) -> bool:
        """Whether the work is in progress."""
        return False

    def cancel(self) -> None:
        """Drop work in progress: the round ended before its workers started. Idempotent."""

    def close(self) -> None:
        """Close at the end of the run. Idempotent."""


class Preparations(list[Preparation]):
    """All preparations of an agent. Its workers start when none is in progress and none failed."""

    def preparing(self) -> bool:
        """Whether workers that are due to start must wait."""
        return any(preparation.preparing() for preparation in self)

    def failed(self) -> Preparation | None:
        """The first preparation that failed, so that the workers cannot start; None if they can."""
        return next((preparation for preparation in self if preparation.failure), None)

    @property
    def end_job(self) -> bool:
        """Whether a preparation failed in a way that no restart can fix."""
        return any(preparation.failure and preparation.ends_job for preparation in self)


class Gate(Source, Protocol):
    """A check that must pass before this node requests a place. It begins when it is created."""

    def step(self) -> Iterable[NodeChecked | WorkersStopped]:
        """Do what is due. Yields the result once, when no process of the check is left."""
        ...

    def begin_stop(self, number: int) -> None:
        """End the check with this signal; its result then means nothing."""

    def kill_now(self) -> None:
        """End the grace period of the check."""

    def end(self, number: int) -> None:
        """End the check with this signal, and return when it is gone."""


class Keeper(Protocol):
    """Keeps workers in their processes from one round to the next."""

    def make_ready(self) -> None:
        """Import what the end of a round needs, while nothing waits for it."""

    def begin_release(
        self, context: PContext, death_sig: Signals, grace: float, limit: float, *, sent: bool
    ) -> Stop | None:
        """Make the workers leave their round, and end those that do not; see `PContext.begin_close`."""
        ...

    def enter(self, context: PContext) -> tuple[int, ...]:
        """Let waiting workers enter the round of a context that has not started yet. Returns their local ranks."""
        ...

    def note_failures(self, failures: Mapping[int, ProcessFailure], seconds: float, *, progress: bool) -> None:
        """Note failures, by local rank, of workers that entered a round this way, this long after the round's start."""


class Hooks:
    """Hooks of a run's features into its workers' lifecycle: methods of `feature.Feature`, in the order in which the
    features were created."""

    def __init__(self) -> None:
        self.prepare: list[Callable[[], None]] = []
        self.on_reaper_closed: list[Callable[[], None]] = []
        self.node_info: list[Callable[[NodeInfo], NodeInfo]] = []
        self.process_options: list[Callable[[ProcessOptions], ProcessOptions]] = []
        self.before_start: list[Callable[[PContext], None]] = []
        self.take_places: list[Callable[[PContext], None]] = []
        self.holds_folder: list[Callable[[], bool]] = []
        self.processes: list[Callable[[], tuple[WaitingProcess, ...]]] = []
        self.keeper: list[Callable[[], Keeper | None]] = []
        self.figures: list[Callable[[], Mapping[str, float]]] = []
        self.on_workers_gone: list[Callable[[], None]] = []
        self.finish: list[Callable[[BaseException | None], None]] = []


class Observer(Protocol):
    """A callback for each event of the loop. It decides nothing, and never blocks."""

    def __call__(
        self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...], /
    ) -> None:
        """Observe the policy's decision on an event, before its steps are taken; None is the start of the run."""


class Watchers(Source):
    """Sources that only watch: the loop drives each of them until it raises."""

    def __init__(self) -> None:
        self._sources: dict[Source, str] = {}
        """Kept with their names in `seconds`, as are the observers: the loop needs them in each pass."""
        self._observers: dict[Observer, str] = {}
        self.seconds: dict[str, float] = {}
        """Seconds that each watcher has used on the loop's thread, by class name."""

    def add(self, source: Source) -> None:
        """Also drive this source from now on."""
        self._sources[source] = _name(source)

    def observe_with(self, observer: Observer) -> None:
        """Also notify this observer from now on."""
        self._observers[observer] = _name(observer)

    def observe(self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...]) -> None:
        """Notify all observers."""
        for observer, name in tuple(self._observers.items()):
            if not self._call(name, observer, before, event, after, steps):
                del self._observers[observer]

    def guard(self, handle: Callable[[Any], object]) -> Callable[[Any], object]:
        """Wrap an event handler to guard it and count its time."""
        name = _name(handle)
        return lambda event: self._call(name, handle, event)

    def fds(self) -> Iterable[int]:
        found: list[int] = []
        self._each(lambda source: found.extend(source.fds()))
        return found

    def wake_at(self) -> float:
        times = [math.inf]
        self._each(lambda source: times.append(source.wake_at()))
        return min(times)

    def step(self) -> Iterable[Event]:
        events: list[Event] = []
        self._each(lambda source: events.extend(source.step() or ()))
        return events

    def _each(self, ask: Callable[[Source], None]) -> None:
        for source, name in tuple(self._sources.items()):
            if not self._call(name, ask, source):
                del self._sources[source]

    def _call(self, name: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Call the watcher with this name, and count its time. Returns whether it succeeded."""
        began = SYSTEM_CLOCK.monotonic()
        try:
            return guarded(name, call, *args, **kwargs)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + SYSTEM_CLOCK.monotonic() - began


def _name(watcher: object) -> str:
    """Name a watcher's class, even for a method; for a function, its own name."""
    owner = getattr(watcher, "__self__", watcher)
    return getattr(owner, "__qualname__", type(owner).__name__)
