"""The phases of a node, and an agent's totals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.observe.metrics import RECOVERY_BOUNDS, AgentAccount
from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import NodePhase, PhaseClock

PHASES = st.lists(st.tuples(st.sampled_from(NodePhase), st.floats(0, 1e6), st.floats(0, 1e4)), max_size=30)


@given(PHASES, st.floats(0, 1e6), st.floats(0, 1e6))
def test_phase_clock(steps: list[tuple[NodePhase, float, float]], began: float, last: float) -> None:
    clock, now = PhaseClock(began), began
    for phase, lasted, held in steps:
        now += lasted
        clock.enter(phase, now, held)
    now += last
    seconds = clock.seconds(now)
    assert sum(seconds.values()) == pytest.approx(now - began, rel=1e-9, abs=1e-6)
    assert min(seconds.values()) >= 0
    assert clock.seconds(now) == seconds


def test_rendezvous_follows_held_back() -> None:
    clock = PhaseClock(10.0)
    clock.enter(NodePhase.HELD_BACK, 12.0, 4.0)
    assert clock.seconds(15.0)[NodePhase.HELD_BACK] == 3.0
    clock.enter(NodePhase.STARTING, 21.0)
    found = clock.seconds(22.0)
    assert (found[NodePhase.HELD_BACK], found[NodePhase.RENDEZVOUS], found[NodePhase.STARTING]) == (4.0, 7.0, 1.0)


FAILURE = events.Failure(rank=3, local_rank=1, host="a", pid=7, exit_code=-9, message="killed")


def made(kind: type[events.AgentEvent], elapsed: float, **fields: Any) -> events.AgentEvent:
    return kind(time=1e9 + elapsed, elapsed=elapsed, job="j", host="a", pid=1, round=fields.pop("round", 0), **fields)


def placed(elapsed: float, number: int) -> events.AgentEvent:
    of_round = {"group_rank": 1, "group_world_size": 2, "first_rank": 2, "local_world_size": 2, "world_size": 4}
    return made(events.RoundStarted, elapsed, round=number, restarts=0, max_restarts=3, **of_round)


STEPS = st.lists(
    st.tuples(
        st.floats(0, 1e4),
        st.one_of(
            st.tuples(
                st.just(events.PhaseBegan),
                st.fixed_dictionaries({"phase": st.sampled_from(NodePhase), "seconds": st.floats(0, 1e4)}),
            ),
            st.just((events.WorkerFailed, {"failure": FAILURE})),
            st.just((events.WorkersStarted, {"pids": (1,)})),
            st.tuples(
                st.just(events.RoundOver),
                st.fixed_dictionaries({"reason": st.sampled_from(["failure", "lost", "drained"])}),
            ),
        ),
    ),
    max_size=30,
)


@given(STEPS)
def test_agent_account(steps: list[tuple[float, tuple[Any, dict[str, Any]]]]) -> None:
    account, now, started = AgentAccount(), 0.0, 0
    before = dict(account.read(0.0).seconds)
    for passed, (kind, fields) in steps:
        now += passed
        account.count(made(kind, now, **fields))
        for moment in (now, now + 1.5):
            seconds = account.read(moment).seconds
            assert sum(seconds.values()) == pytest.approx(moment, rel=1e-9, abs=1e-9)
        seconds = account.read(now).seconds
        assert all(seconds[phase] >= before[phase] - 1e-6 for phase in NodePhase)
        before = dict(seconds)
        started += kind is events.WorkersStarted
    counted = account.read(now)
    assert list(counted.recoveries) == sorted(counted.recoveries), "a histogram"
    assert len(counted.recoveries) == len(RECOVERY_BOUNDS) + 1
    assert counted.recoveries[-1] <= started
    assert counted.recovery_seconds <= now + 1e-6


def test_recoveries() -> None:
    account = AgentAccount()
    for event in (
        placed(1.0, 0),
        made(events.WorkersStarted, 1.1, pids=(1, 2)),  # the first start is no recovery
        made(events.WorkerFailed, 10.0, failure=FAILURE),
        made(events.RoundOver, 10.5, reason="failure"),
        placed(11.0, 1),
        made(events.WorkersStarted, 12.0, round=1, pids=(1, 4), survived=(0,)),
        made(events.RoundOver, 20.0, round=1, reason="drained"),
        made(events.WorkersStarted, 21.0, round=2, pids=(5, 6)),  # nor is a start after a drain
        made(events.ProgressMade, 22.0, step=7, age=0.5, source="call"),
        made(events.ProgressMade, 23.0, step=5, age=0.5, source="call"),
    ):
        account.count(event)
    counted = account.read(30.0)
    assert (counted.recoveries[-1], counted.recovery_seconds) == (1, 2.0)
    assert counted.recoveries[RECOVERY_BOUNDS.index(1.0)] == 0
    assert counted.recoveries[RECOVERY_BOUNDS.index(2.5)] == 1
    assert (counted.restarts, counted.failures) == ({"failure": 1, "drained": 1}, {"SIGKILL": 1})
    assert (counted.round, counted.rounds, counted.step, counted.survived) == (1, 2, 7, 1)
    assert counted.progress_at == pytest.approx(1e9 + 22.5)
