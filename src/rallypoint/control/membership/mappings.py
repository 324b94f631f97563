"""Mappings and sets that are replaced, never changed: what one entry more or less costs hardly grows with their size.

Few entries are a plain `dict` or `frozenset`, which is copied. Many are kept in layers (`layers`), which a small job
does not import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from rallypoint.base.light_typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rallypoint.control.membership.layers import LayeredMap

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

FEW = 256
"""Entries up to which a copy costs no more than layers."""


def with_entry(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The mapping with this entry: at its end, or in the place of the one with this key."""
    return {**mapping, key: value} if len(mapping) < FEW else layered(mapping).with_entry(key, value)


def without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    """The mapping without this key; itself if it does not have it."""
    if key not in mapping:
        return mapping
    if len(mapping) > FEW:
        return layered(mapping).without(key)
    rest = dict(mapping)
    del rest[key]
    return rest


def without_all(mapping: Mapping[K, V], keys: AbstractSet[K]) -> Mapping[K, V]:
    """The mapping without these keys; itself if it has none of them."""
    if len(keys) > FEW:
        left = {key: value for key, value in mapping.items() if key not in keys}
        return mapping if len(left) == len(mapping) else left
    for key in keys:
        mapping = without(mapping, key)
    return mapping


def with_member(members: AbstractSet[K], member: K) -> AbstractSet[K]:
    """The set with this member."""
    if len(members) < FEW:
        return frozenset(members) | {member}
    from rallypoint.control.membership.layers import LayeredSet

    return LayeredSet(with_entry(LayeredSet.entries_of(members), member, None))


def without_member(members: AbstractSet[K], member: K) -> AbstractSet[K]:
    """The set without this member."""
    if len(members) <= FEW:
        return frozenset(members) - {member}
    from rallypoint.control.membership.layers import LayeredSet

    return LayeredSet(without(LayeredSet.entries_of(members), member))


def tally(mapping: Mapping[K, V], of: Callable[[K, V], T]) -> Mapping[T, int]:
    """How many entries have each value of `of`, a function of a module. Of many entries that is counted once: each
    mapping that is made of another takes over what was counted there.
    """
    if len(mapping) > FEW:
        return layered(mapping).tally(of)
    counts: dict[T, int] = {}
    for key, value in mapping.items():
        kind = of(key, value)
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def any_with(mapping: Mapping[K, V], of: Callable[[K, V], T], target: T) -> bool:
    """Whether an entry has this value of `of`, as in `tally`."""
    if len(mapping) > FEW:
        return target in layered(mapping).tally(of)
    return any(of(key, value) == target for key, value in mapping.items())


def layered(mapping: Mapping[K, V]) -> LayeredMap[K, V]:
    """A mapping of many entries, in layers."""
    from rallypoint.control.membership.layers import LayeredMap

    return mapping if isinstance(mapping, LayeredMap) else LayeredMap.from_mapping(mapping)
