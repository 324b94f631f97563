"""The laws of the core and the coordinator hold whatever happens, in whatever order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from rallypoint.control.membership import mappings
from rallypoint.control.membership.rules import step
from rallypoint.control.membership.state import NoChange, Outcome, Settings, State
from tests.effort import examples
from tests.unit.rendezvous.jobs import EVENTS, SETTINGS, Life

Events = list[tuple[str, int, int]]


def lived(job: Settings, events: Events) -> Life:
    life = Life(job)
    for event in events:
        life.happen(*event)
    return life


@settings(max_examples=examples(400))
@given(SETTINGS, EVENTS)
def test_a_round_has_one_membership_with_each_rank_once(job: Settings, events: Events) -> None:
    for round_, roll in lived(job, events).rolls.items():
        places = sorted(roll.values(), key=lambda each: each.group_rank)
        size = places[0].group_world_size
        assert [each.group_rank for each in places] == list(range(size)), f"round {round_}"
        assert job.min_nodes <= size <= job.max_nodes
        assert {each.group_world_size for each in places} == {size}
        assert len({(each.store_address, each.store_port, each.restarts) for each in places}) == 1
        bases = [each.ranks.base_rank for each in places] + [places[0].ranks.world_size]
        assert all(low < high for low, high in pairwise(bases))


@settings(max_examples=examples(400))
@given(SETTINGS, EVENTS)
def test_rounds_only_grow_and_only_when_a_complete_one_ends(job: Settings, events: Events) -> None:
    for before, after in pairwise(lived(job, events).states):
        assert after.round >= before.round
        if before.closed:
            assert after.round == before.round
        if after.round > before.round and not before.complete:
            # one event may complete a round and end it only if it also completed the one before
            assert after.round == before.round + 1
        if before.complete and after.complete and before.round == after.round:
            assert set(after.participants) <= set(before.participants)


@settings(max_examples=examples(400))
@given(SETTINGS, EVENTS)
def test_only_a_verdict_closes_and_it_never_changes(job: Settings, events: Events) -> None:
    for before, after in pairwise(lived(job, events).states):
        assert after.closed == (after.verdict is not None)
        if before.verdict is not None:
            assert after.verdict == before.verdict


@settings(max_examples=examples(400))
@given(SETTINGS, EVENTS)
def test_each_failure_is_counted_once_and_nothing_else_costs_a_restart(job: Settings, events: Events) -> None:
    life = lived(job, events)
    state = life.coordinator.state
    for before, after in pairwise(life.states):
        assert after.ledger.failures - before.ledger.failures in (0, 1)
    assert state.ledger.failures <= life.budget + 1
    failed = state.verdict is not None and state.verdict.outcome is Outcome.FAILED
    assert failed == (state.ledger.failures == life.budget + 1)
    entries = state.ledger
    ended = entries.failures - failed + entries.lost + entries.departed + entries.drained
    assert ended == state.round


@settings(max_examples=examples(400))
@given(SETTINGS, EVENTS)
def test_a_node_stands_in_one_list(job: Settings, events: Events) -> None:
    for state in lived(job, events).states:
        lists = [state.participants, state.wait_list, state.redundancy_list, state.survivors]
        standing = [node for each in lists for node in each]
        assert len(standing) == len(set(standing))
        assert len(state.participants) + len(state.wait_list) + len(state.survivors) <= job.max_nodes


@settings(max_examples=examples(400))
@given(SETTINGS, EVENTS)
def test_a_round_forms_when_enough_nodes_live_and_ask(job: Settings, events: Events) -> None:
    """Liveness: whatever happened, once min nodes that may still join have asked and time passes, a round runs."""
    life = lived(job, events)
    for node in range(5):
        life.happen("open", node, 0)
    for node in range(5):
        life.happen("join", node, 0)
    life.happen("wait", 0, 31 if job.last_call_timeout > 20 else 20)
    state = life.coordinator.state
    assert state.verdict is not None or state.complete or _timed_out(state, job)


def _timed_out(state: State, job: Settings) -> bool:
    """The last call may outlast the join timeout; then joins are taken back, as they must."""
    return job.last_call_timeout > job.join_timeout and not state.participants


@settings(max_examples=examples(400))
@given(SETTINGS, EVENTS)
def test_no_join_waits_that_could_continue(job: Settings, events: Events) -> None:
    life = Life(job)
    for event in events:
        life.happen(*event)
        coordinator = life.coordinator
        for node, join in coordinator._pending.items():
            view = coordinator.clock_view(life.now)
            assert step(join, coordinator.state, node, view, coordinator.settings) is NoChange.WAIT


@settings(max_examples=examples(200))
@given(SETTINGS, EVENTS)
def test_a_large_job_lives_as_a_small_one(job: Settings, events: Events) -> None:
    """Whether few nodes are kept in plain mappings, or as many are, makes no difference."""
    few = lived(job, events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mappings, "FEW", 1)
        many = lived(job, events)
    assert many.states == few.states
    assert [list(each.participants) for each in many.states] == [list(each.participants) for each in few.states]
    assert many.rolls == few.rolls
