"""Lines of event files, sorted by the agents that wrote them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from rallypoint.telemetry.agent_events import KINDS, AgentEnded, AgentEvent, AgentStarted, RoundStarted

RoundKey = tuple[str, int]
"""The coordinator that completed a round, and its number: together a name for good."""


@dataclass(frozen=True)
class AgentRun:
    """One agent, from its start to its end.

    Args:
        job: the job's id.
        host: its machine's name.
        name: no other run has it: its host; with the agent's process id where a host has several, and with a number
            where that is the same too, as in a pod that was started again.
        began: when it began, in epoch seconds on its own clock.
        events: what it has told, in order; at least one event.
    """

    job: str
    host: str
    name: str
    began: float
    events: tuple[AgentEvent, ...]

    @cached_property
    def placed(self) -> dict[RoundKey, float]:
        """When it was given a place in each of its rounds, in seconds since it began."""
        return {self.key_of(each): each.elapsed for each in self.events if isinstance(each, RoundStarted)}

    @property
    def first(self) -> float:
        """From when on there are events, in seconds since it began: later than that where old ones were removed."""
        return 0.0 if isinstance(self.events[0], AgentStarted) else self.events[0].elapsed

    @property
    def last_round(self) -> RoundKey | None:
        """The last round that it had a place in."""
        return next(reversed(self.placed), None)

    @property
    def ended(self) -> bool:
        """Whether it has said that it ends."""
        return any(isinstance(each, AgentEnded) for each in self.events[-3:])

    @staticmethod
    def key_of(event: RoundStarted) -> RoundKey:
        """The name of a round."""
        return event.origin, event.round

    def in_rounds(self) -> Iterator[tuple[RoundKey, AgentEvent]]:
        """Each event that belongs to a round which it had a place in, with that."""
        keys: dict[int, RoundKey] = {}
        for each in self.events:
            if isinstance(each, RoundStarted):
                keys[each.round] = self.key_of(each)
            if each.round in keys:
                yield keys[each.round], each


_Key = tuple[str, str, int]
"""Job, host and process id, which a later run may have again."""


@dataclass
class _Open:
    began: float
    events: list[AgentEvent] = field(default_factory=list)


def agent_runs(lines: Iterable[KINDS]) -> list[AgentRun]:
    """The agents that have told these events, in the order in which they began.

    Two agents of one host and process id, one after the other, are told apart by where they began.
    """
    open_runs: dict[_Key, _Open] = {}
    found: list[tuple[_Key, _Open]] = []
    for event in lines:
        key = (event.job, event.host, event.pid)
        run = open_runs.get(key)
        if run is None or _is_later_run(event, run.events[-1]):
            run = open_runs[key] = _Open(event.time - event.elapsed)
            found.append((key, run))
        run.events.append(event)
    found.sort(key=lambda each: (each[1].began, each[0]))
    return [
        AgentRun(key[0], key[1], name, run.began, tuple(sorted(run.events, key=lambda each: each.elapsed)))
        for (key, run), name in zip(found, _names([key for key, _ in found]), strict=True)
    ]


def _is_later_run(event: AgentEvent, last: AgentEvent) -> bool:
    """Whether an event begins a run, or is of one whose first lines were removed: `last` came before it."""
    began = event.time - event.elapsed
    return isinstance(event, AgentStarted) or (event.elapsed < last.elapsed and began > last.time)


def _names(keys: list[_Key]) -> Iterator[str]:
    hosts = Counter(host for _, host, _ in keys)
    all_keys, so_far = Counter(keys), Counter[_Key]()
    for key in keys:
        _, host, pid = key
        so_far[key] += 1
        if hosts[host] == 1:
            yield host
        else:
            yield f"{host} pid {pid}" + (f" run {so_far[key]}" if all_keys[key] > 1 else "")
