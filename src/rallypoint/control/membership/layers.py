"""A mapping and a set for many entries, each sharing most of its entries with its predecessor (`mappings`).

Laws:

1. Readers can use them like a `dict` and a `frozenset`. A mapping also has a `dict`'s insertion order, which is the
   same in each process.
2. Neither they nor their layers ever change, except for cached results of `tally`.
3. The upper layers contain at most about the square root of 2n entries: copying them at each change, and all n entries
   now and then, has the lowest total cost.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from itertools import chain, filterfalse

from rallypoint.base.light_typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class LayeredMap(Mapping[K, V]):
    """Most entries are in the lower layer. `added` contains newer entries, including replacements; `gone` contains the
    removed keys of the lower layer. A key that was removed and added again is in both."""

    __slots__ = ("_added", "_gone", "_lower", "_size", "_tallies")

    def __init__(
        self,
        lower: dict[K, V],
        added: dict[K, V],
        gone: frozenset[K],
        size: int,
        tallies: dict[Callable[[K, V], Any], LayeredMap[Any, int]],
    ) -> None:
        upper = len(added) + len(gone)
        if upper * upper > 2 * size:
            lower = self._merged(lower, added, gone)
            added, gone = {}, frozenset()
        self._lower, self._added, self._gone, self._size, self._tallies = lower, added, gone, size, tallies

    @staticmethod
    def _merged(lower: dict[K, V], added: dict[K, V], gone: frozenset[K]) -> dict[K, V]:
        if not added and not gone:
            return lower
        merged = lower.copy()
        for key in gone:
            del merged[key]
        merged.update(added)
        return merged

    @classmethod
    def from_mapping(cls, entries: Mapping[K, V]) -> LayeredMap[K, V]:
        """The layered form of a mapping that never changes."""
        return cls(entries if isinstance(entries, dict) else dict(entries), {}, frozenset(), len(entries), {})

    def with_entry(self, key: K, value: V) -> LayeredMap[K, V]:
        """See the function of the same name."""
        present = self.get(key, _NONE)
        tallies = self._tallies
        if tallies:
            tallies = {of: _with_one(tally, of(key, value), 1) for of, tally in tallies.items()}
            if present is not _NONE:
                tallies = {of: _with_one(tally, of(key, present), -1) for of, tally in tallies.items()}
        size = self._size + (present is _NONE)
        return LayeredMap(self._lower, {**self._added, key: value}, self._gone, size, tallies)

    def without(self, key: K) -> LayeredMap[K, V]:
        """The mapping without this key, which it contains."""
        present = self[key]
        tallies = {of: _with_one(tally, of(key, present), -1) for of, tally in self._tallies.items()}
        added, gone = self._added, self._gone
        if key in added:
            added = added.copy()
            del added[key]
        if key in self._lower and key not in gone:
            gone = gone | {key}
        return LayeredMap(self._lower, added, gone, self._size - 1, tallies)

    def tally(self, of: Callable[[K, V], T]) -> Mapping[T, int]:
        """See the function of the same name."""
        counts = self._tallies.get(of)
        if counts is None:
            numbers: dict[T, int] = {}
            for key, value in self.items():
                kind = of(key, value)
                numbers[kind] = numbers.get(kind, 0) + 1
            counts = self._tallies[of] = LayeredMap.from_mapping(numbers)
        return counts

    def __getitem__(self, key: K) -> V:
        if key in self._added:
            return self._added[key]
        if key in self._gone:
            raise KeyError(key)
        return self._lower[key]

    def get(self, key: Any, default: Any = None) -> Any:
        value = self._added.get(key, _NONE)
        if value is not _NONE:
            return value
        return default if key in self._gone else self._lower.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._added or (key in self._lower and key not in self._gone)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        lower, gone = self._lower, self._gone
        return chain(
            filterfalse(gone.__contains__, lower) if gone else lower,
            (key for key in self._added if key not in lower or key in gone),
        )

    def items(self) -> ItemsView[K, V]:
        return self._merged(self._lower, self._added, self._gone).items()

    def values(self) -> ValuesView[V]:
        return self._merged(self._lower, self._added, self._gone).values()

    def __repr__(self) -> str:
        return repr(dict(self.items()))


_NONE: Any = object()


def _with_one(tallied: LayeredMap[T, int], kind: T, more: int) -> LayeredMap[T, int]:
    number = tallied.get(kind, 0) + more
    return tallied.with_entry(kind, number) if number else tallied.without(kind)


class LayeredSet(AbstractSet[K]):
    """The keys of a mapping."""

    __slots__ = ("entries",)

    def __init__(self, entries: Mapping[K, None]) -> None:
        self.entries = entries

    def __contains__(self, member: object) -> bool:
        return member in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self.entries)

    @staticmethod
    def entries_of(members: AbstractSet[K]) -> Mapping[K, None]:
        """A set's keys as a mapping."""
        return members.entries if isinstance(members, LayeredSet) else dict.fromkeys(members)

    _from_iterable = frozenset

    def __repr__(self) -> str:
        return repr(set(self.entries))
