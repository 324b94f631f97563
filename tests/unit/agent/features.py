"""Features in agents that a test plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.agent.feature import Agent, FeatureSet, Load
from rallypoint.agent.options import Features
from rallypoint.agent.steps import Event
from rallypoint.agent.workers import WorkerController
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.control.protocol.messages import Placement


def agent_of(workers: WorkerController, post: Callable[[Event], None] = lambda _event: None, **options: Any) -> Agent:
    """What a feature finds, with these options."""
    workers.group.spec.features = Features.of(**options)
    return Agent(workers, post, SYSTEM_CLOCK, lambda _text: None)


def with_features(workers: WorkerController, **options: Any) -> FeatureSet:
    """Give an agent that has not run yet the features that these options ask for."""
    found = FeatureSet(agent_of(workers, **options), {}, {})
    found.load(Load.AT_START)
    return found


def enter_round(workers: WorkerController, placement: Placement) -> None:
    """What the agent's actions do when a round begins here."""
    workers.enter_round(placement)
    for preparation in workers.preparations:
        preparation.begin(workers.group)
