"""The laws of the core and the coordinator hold for any events in any order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from rallypoint.control.membership import mappings
from rallypoint.control.membership.rules import step
from rallypoint.control.membership.state import NoChange, NodeRange, Outcome, Settings, State
from rallypoint.control.protocol.messages import Placement
from tests.effort import examples
from tests.unit.rendezvous.jobs import EVENTS, SETTINGS, Life

Events = list[tuple[str, int, int]]


def lived(job: Settings, events: Events) -> Life:
    life = Life(job)
    for event in events:
        life.happen(*event)
    return life


@settings(max_examples=examples(800))
@given(SETTINGS, EVENTS)
def test_the_laws_hold_whatever_happens(job: Settings, events: Events) -> None:
    life = Life(job)
    for event in events:
        life.happen(*event)
        _check_pending_joins(life)
    for state in life.states:
        _check_lists(state, job)
    for before, after in pairwise(life.states):
        check_change(before, after)
    for places in life.rolls.values():
        check_round(list(places.values()), {NodeRange(job.min_nodes, job.max_nodes)})
    _check_ledger(life)
    _check_liveness(life)


def check_round(places: list[Placement], sizes: set[NodeRange]) -> None:
    """A round has one membership, in which each rank occurs once."""
    places = sorted(places, key=lambda place: place.group_rank)
    size = places[0].group_world_size
    assert [place.group_rank for place in places] == list(range(size))
    assert any(least <= size <= most for least, most in sizes)
    assert {place.group_world_size for place in places} == {size}
    assert len({(place.store_address, place.store_port, place.restarts) for place in places}) == 1
    bases = [place.ranks.base_rank for place in places] + [places[0].ranks.world_size]
    assert all(low < high for low, high in pairwise(bases))


def check_change(before: State, after: State) -> None:
    """Rounds only grow, only when a complete one ends. Only a verdict closes the job, and it never changes."""
    assert after.round >= before.round
    assert after.closed == (after.verdict is not None)
    if before.verdict is not None:
        assert (after.round, after.verdict) == (before.round, before.verdict)
    if after.round > before.round and not before.complete:
        # one event may complete a round and end it only if it also completed the one before
        assert after.round == before.round + 1
    if before.complete and after.complete and before.round == after.round:
        assert set(after.participants) <= set(before.participants)
    assert after.ledger.failures - before.ledger.failures in (0, 1)


def _check_ledger(life: Life) -> None:
    """Each failure counts once, and nothing else costs a restart."""
    state, ledger = life.coordinator.state, life.coordinator.state.ledger
    failed = state.verdict is not None and state.verdict.outcome is Outcome.FAILED
    assert failed == (ledger.failures == life.budget + 1)
    assert ledger.failures <= life.budget + 1
    assert ledger.failures - failed + ledger.lost + ledger.departed + ledger.drained == state.round


def _check_lists(state: State, job: Settings) -> None:
    """A node is in one list."""
    lists = [state.participants, state.wait_list, state.redundancy_list, state.survivors]
    nodes = [node for entries in lists for node in entries]
    assert len(nodes) == len(set(nodes))
    assert len(state.participants) + len(state.wait_list) + len(state.survivors) <= job.max_nodes


def _check_pending_joins(life: Life) -> None:
    """No join waits that could continue."""
    coordinator = life.coordinator
    for node, join in coordinator._pending.items():
        view = coordinator.clock_view(life.now)
        assert step(join, coordinator.state, node, view, coordinator.settings) is NoChange.WAIT


def _check_liveness(life: Life) -> None:
    """Once min nodes that may still join have asked and time passes, a round runs."""
    job = life.settings
    for what in ("open", "join"):
        for node in range(5):
            life.happen(what, node, 0)
    life.happen("wait", 0, 31 if job.last_call_timeout > 20 else 20)
    state = life.coordinator.state
    # The last call may outlast the join timeout; then joins are taken back, as they must.
    timed_out = job.last_call_timeout > job.join_timeout and not state.participants
    assert state.verdict is not None or state.complete or timed_out


@settings(max_examples=examples(200))
@given(SETTINGS, EVENTS)
def test_large_jobs_behave_like_small_ones(job: Settings, events: Events) -> None:
    """It makes no difference whether the state is kept in plain or in layered mappings."""
    few = lived(job, events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mappings, "FEW", 1)
        many = lived(job, events)
    assert many.states == few.states
    assert [list(state.participants) for state in many.states] == [list(state.participants) for state in few.states]
    assert many.rolls == few.rolls
