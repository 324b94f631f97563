"""Give features to agents in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.agent.feature import Agent, FeatureSet, Load
from rallypoint.agent.options import Features
from rallypoint.agent.sources import Preparation
from rallypoint.agent.steps import Event
from rallypoint.agent.workers import WorkerController
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.kernel import until_readable
from rallypoint.control.protocol.messages import Placement


def agent_of(workers: WorkerController, post: Callable[[Event], None] = lambda _event: None, **options: Any) -> Agent:
    """The agent that a feature gets, with these options."""
    workers.group.spec.features = Features.of(**options)
    return Agent(workers, post, SYSTEM_CLOCK, lambda _text: None)


def with_features(workers: WorkerController, **options: Any) -> FeatureSet:
    """Load the features that these options ask for, before the agent runs."""
    found = FeatureSet(agent_of(workers, **options), {}, {})
    found.load(Load.AT_START)
    return found


def enter_round(workers: WorkerController, placement: Placement) -> None:
    """Begin a round as the agent's actions do."""
    workers.enter_round(placement)
    for preparation in workers.preparations:
        preparation.begin(workers.group)


def finish(*preparations: Preparation) -> float:
    """Run the agent's loop until these preparations are done; returns the seconds."""
    began = now = SYSTEM_CLOCK.monotonic()
    while any(preparation.preparing() for preparation in preparations):
        assert now < began + 120.0, "a preparation hangs"
        wake_at = min(preparation.wake_at() for preparation in preparations)
        fds = [fd for preparation in preparations for fd in preparation.fds()]
        until_readable(fds, max(0.0, min(wake_at, began + 120.0) - now))
        for preparation in preparations:
            preparation.step()
        now = SYSTEM_CLOCK.monotonic()
    return now - began
