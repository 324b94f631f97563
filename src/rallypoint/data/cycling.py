"""An iterator that goes over a data set once per epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class CyclingIterator(Generic[T], Iterator[T]):
    """Iterates over what `generator_fn` returns for one epoch after another.

    Args:
        n: the number of epochs; the last one is `n - 1`.
        generator_fn: returns an epoch's items; called when the epoch begins, for the first one at once.
        start_epoch: the first epoch, for a job that continues.
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterable[T]], start_epoch: int = 0) -> None:
        self._n = n
        self._generator_fn = generator_fn
        self._epoch = start_epoch
        self._items = iter(generator_fn(start_epoch))

    def __iter__(self) -> CyclingIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                return next(self._items)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            self._epoch += 1
            self._items = iter(self._generator_fn(self._epoch))
