"""Watchers of a job cannot end it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from rallypoint.agent import sources
from rallypoint.agent.policy import PolicyState
from rallypoint.agent.sources import Source, Watchers, guarded
from rallypoint.agent.steps import Event, Timer, TimerFired
from tests.unit.clocks import HandClock

STATE = PolicyState()


class Usual(Source):
    """A source that works."""

    def fds(self) -> Iterable[int]:
        return (7,)

    def wake_at(self) -> float:
        return 5.0

    def step(self) -> Iterable[Event]:
        return (TimerFired(Timer.NOTICE),)


class Broken(Usual):
    """A source with one method that raises."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self._fail_later if method == "step" else self._fail)

    def _fail(self) -> float:
        raise OSError("no descriptor is left")

    def _fail_later(self) -> Iterable[Event]:
        yield TimerFired(Timer.NOTICE)
        raise OSError("no descriptor is left")


CALLS: dict[str, Callable[[Watchers], object]] = {
    "fds": lambda watchers: list(watchers.fds()),
    "wake_at": lambda watchers: watchers.wake_at(),
    "step": lambda watchers: list(watchers.step()),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_failed_source_is_dropped(method: str, caplog: pytest.LogCaptureFixture) -> None:
    watchers = Watchers()
    assert [call(watchers) for call in CALLS.values()] == [[], math.inf, []]
    watchers.add(Broken(method))
    watchers.add(Usual())
    for call in (*CALLS.values(), *CALLS.values()):
        call(watchers)
    assert [call(watchers) for call in CALLS.values()] == [[7], 5.0, [TimerFired(Timer.NOTICE)]]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "Broken failed; the job continues without it. This is a bug in Rallypoint (please report it)"
    ]


def test_a_failed_observer_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    observed: list[Event | None] = []

    def broken(*_: object) -> None:
        raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")

    watchers = Watchers()
    watchers.observe_with(broken)
    watchers.observe_with(lambda _before, event, _after, _steps: observed.append(event))
    watchers.observe(STATE, None, STATE, ())
    watchers.observe(STATE, TimerFired(Timer.NOTICE), STATE, ())
    assert observed == [None, TimerFired(Timer.NOTICE)]
    assert len([record for record in caplog.records if "broken" in record.message]) == 1


def test_the_time_of_each_source_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    monkeypatch.setattr(sources, "SYSTEM_CLOCK", clock)

    class Slow(Usual):
        def step(self) -> Iterable[Event]:
            clock.now += 2.0
            return ()

    watchers = Watchers()
    for watcher in (Slow(), Broken("step"), Slow()):
        watchers.add(watcher)
    list(watchers.step())
    assert watchers.seconds == {Slow.__name__: 4.0, "Broken": 0.0}, "also of the one that raises"


def test_interrupts_are_not_caught() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("a watcher", interrupted)
