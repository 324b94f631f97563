"""Persistent mappings and sets behave like `dict` and `frozenset`, and never change."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership import mappings
from rallypoint.control.membership.layers import LayeredMap
from rallypoint.control.membership.mappings import (
    any_with,
    tally,
    with_entry,
    with_member,
    without,
    without_all,
    without_member,
)

KEYS = st.integers(0, 30)
CHANGES = st.lists(st.tuples(st.booleans(), KEYS, st.integers(0, 3)), max_size=80)


@pytest.fixture(autouse=True)
def _layers_from_the_first_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "FEW", 1)


def _value(_key: int, value: int) -> int:
    return value


def _is_even(key: int, _value: int) -> bool:
    return key % 2 == 0


def _assert_same(mapping: Mapping[int, int], model: dict[int, int]) -> None:
    assert mapping == model
    assert model == mapping
    assert (list(mapping.items()), list(mapping.values())) == (list(model.items()), list(model.values()))
    assert (list(mapping), len(mapping), bool(mapping), {**mapping}) == (list(model), len(model), bool(model), model)
    for key in range(31):
        assert (key in mapping, mapping.get(key, -1)) == (key in model, model.get(key, -1))
        if key in model:
            assert mapping[key] == model[key]
        else:
            with pytest.raises(KeyError):
                mapping[key]
    assert tally(mapping, _value) == {value: list(model.values()).count(value) for value in model.values()}
    assert any_with(mapping, _is_even, True) == any(key % 2 == 0 for key in model)


@given(CHANGES)
def test_a_mapping_behaves_like_a_dict_and_earlier_versions_do_not_change(changes: list[tuple[bool, int, int]]) -> None:
    seen: list[tuple[Mapping[int, int], dict[int, int]]] = [({}, {})]
    for adds, key, value in changes:
        mapping, before = seen[-1]
        model = dict(before)
        if adds:
            mapping, model[key] = with_entry(mapping, key, value), value
        else:
            changed = without(mapping, key)
            assert (changed is mapping) == (model.pop(key, None) is None)
            mapping = changed
        _assert_same(mapping, model)
        seen.append((mapping, model))
    for mapping, model in seen:
        _assert_same(mapping, model)


@given(st.frozensets(KEYS), st.frozensets(KEYS), st.integers(1, 40))
def test_removing_several_keys_at_once(kept: frozenset[int], gone: frozenset[int], few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mappings, "FEW", few)
        mapping = dict.fromkeys(kept, 0)
        left = without_all(mapping, gone)
        assert list(left) == [key for key in mapping if key not in gone]
        assert (left is mapping) == kept.isdisjoint(gone)


@given(CHANGES)
def test_a_set_behaves_like_a_frozenset(changes: list[tuple[bool, int, int]]) -> None:
    members: AbstractSet[int] = frozenset()
    model: frozenset[int] = frozenset()
    for adds, member, _ in changes:
        members, model = (
            (with_member(members, member), model | {member})
            if adds
            else (without_member(members, member), model - {member})
        )
        assert members == model
        assert model == members
        assert (sorted(members), len(members), 7 in members) == (sorted(model), len(model), 7 in model)
        assert members | {99} == model | {99}
        assert members - {3} == model - {3}
        assert (members >= {3}) == (model >= {3})


def test_changing_a_large_mapping_copies_few_entries() -> None:
    """Few entries per change, and many changes between full copies."""
    many = 10_000
    mapping: Mapping[int, int] = {}
    lower, merges = None, 0
    for key in range(many):
        mapping = with_entry(mapping, key, key)
        if isinstance(mapping, LayeredMap):
            assert len(mapping._added) <= (2 * many) ** 0.5
            merges += mapping._lower is not lower
            lower = mapping._lower
    assert merges <= 2 * (2 * many) ** 0.5
    for key in range(many - 1):
        mapping = without(mapping, key)
        assert not isinstance(mapping, LayeredMap) or len(mapping._gone) <= (2 * many) ** 0.5
