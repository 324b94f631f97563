"""What a step of the election knows and puts out: its time, its effects, the watches that are on. Pure."""

from __future__ import annotations

from rallypoint.base.errors import RallypointError
from rallypoint.election.steps import DEBUG, WARNING, Effect, EndWatch, EtcdTrouble, Watched, WatchKeys, WriteLog

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
        """What was last logged to be wrong, and until when that is not logged again."""

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
        """What the watch of that number watches; None if it is on no more."""
        return next((kind for kind, each in self._watches.items() if each == number), None)

    def has_ended(self, kind: Watched) -> None:
        """The watch of that kind has ended by itself."""
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
        """Log what is wrong, once in a while; with a traceback where nobody has foreseen it."""
        if self._warned_of is not None and self._warned_of[0] is type(error) and self.now < self._warned_of[1]:
            self.log(DEBUG, "%s: %s", what, error)
            return
        self._warned_of = type(error), self.now + _WARN_INTERVAL
        unforeseen = None if isinstance(error, RallypointError) else error
        self.add(WriteLog(WARNING, "%s: %s", (what, error), unforeseen))
