"""How often the agent looks at its standby workers."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.agent.feature import Agent
from rallypoint.agent.options import Features
from rallypoint.agent.spec import WorkerState
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.features import standby
from rallypoint.features.standby import StandbyWorkers


def test_looks_at_a_slow_standby_worker_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(standby, "SYSTEM_CLOCK", SimpleNamespace(monotonic=lambda: now))
    spec = SimpleNamespace(role="default", local_world_size=2, entrypoint="python", args=(), virtual_local_rank=False)
    spec.features = Features.of(standby=1)
    group = SimpleNamespace(spec=spec, notices="", state=WorkerState.HEALTHY, placement=SimpleNamespace(round=0))
    folder = SimpleNamespace(made=lambda: True)
    workers: Any = SimpleNamespace(group=group, folder=folder)
    source = StandbyWorkers(Agent(workers, print, SYSTEM_CLOCK, print))
    preparing: Any = SimpleNamespace(
        place=2, context=SimpleNamespace(poll=lambda: None), since=0.0, prepared=False, pid=7
    )
    source._waiting.append(preparing)
    looks = [now]
    source.step()
    while now < 300.0:
        now = source.wake_at()
        looks.append(now)
        source.step()
    assert max(after - before for before, after in pairwise(looks)) <= 2.0
