"""Immutable mappings and sets: adding or removing an entry costs hardly more in a large one.

A few entries are in a plain `dict` or `frozenset`, which is copied. Many are in layers (`layers`), a module that a
small job does not import.
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
"""Number of entries up to which a copy costs no more than layers."""


def with_entry(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The mapping with this entry, at the end or in place of the entry with this key."""
    return {**mapping, key: value} if len(mapping) < FEW else layered(mapping).with_entry(key, value)


def without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    """The mapping without this key; itself if the key is missing."""
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
    """The number of entries for each value of `of`, a module-level function. Many entries are counted once: each
    mapping updates the counts of its predecessor."""
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
    """The layered form of a mapping with many entries."""
    from rallypoint.control.membership.layers import LayeredMap

    return mapping if isinstance(mapping, LayeredMap) else LayeredMap.from_mapping(mapping)
