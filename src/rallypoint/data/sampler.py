"""A sampler for workers whose number changes from round to round."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any, Self

from rallypoint.base.errors import UserError
from rallypoint.data.permutation import permutation


class ElasticDistributedSampler:
    """Gives each worker its share of the indices of a dataset from `start_index` on, shuffled anew in each epoch.

    Every worker gets the same number: if they do not divide evenly, some are given twice. The order is that of torch's
    sampler of the same name. A `DataLoader` accepts it as its `sampler`. If torch's samplers have been imported when
    the sampler is created, it is also a `torch.utils.data.DistributedSampler`: trainers check that before they set the
    epoch.

    Args:
        dataset: an object with a length.
        num_replicas: how many workers share the dataset; None for `WORLD_SIZE`.
        rank: the rank of this worker among them; None for `RANK`.
        start_index: the first index to process, for an epoch that continues.

    Raises:
        UserError: a number is out of range, or is given neither by the caller nor by the environment.
    """

    def __new__(cls, *_arguments: object, **_named: object) -> Self:
        kind: Any = _torch_subclass(cls)
        made: Self = object.__new__(kind)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (_CLASS_WITHOUT_TORCH.get(type(self), type(self)),), vars(self)

    def __init__(
        self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None, start_index: int = 0
    ) -> None:
        self.dataset = dataset
        self.num_replicas = _argument_or_variable(num_replicas, "num_replicas", "WORLD_SIZE")
        self.rank = _argument_or_variable(rank, "rank", "RANK")
        self.start_index = start_index
        self.epoch = 0
        self.seed = 0
        self.shuffle = True
        self.drop_last = False
        if self.num_replicas < 1:
            raise UserError(f"num_replicas={self.num_replicas} workers cannot share a dataset; give 1 or more")
        if not 0 <= self.rank < self.num_replicas:
            raise UserError(f"Invalid rank {self.rank}, rank should be in the interval [0, {self.num_replicas - 1}]")
        if start_index < 0:
            raise UserError(f"Start index {start_index} is negative; give the first index that is to be worked on")
        if start_index >= len(dataset):
            raise UserError(f"Start index {start_index} should be less than dataset size {len(dataset)}")
        self.num_samples = -(-(len(dataset) - start_index) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from which the order is derived; every worker must set the same."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        left = len(self.dataset) - self.start_index
        order = [self.start_index + each for each in permutation(left, self.epoch)]
        return islice(cycle(order), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        """The number of indices of this worker in an epoch."""
        return self.num_samples


_CLASS_WITHOUT_TORCH: dict[type, type] = {}
"""For each class that is torch's too, the class it was made from, by which pickles name it."""


def _torch_subclass(kind: type) -> type:
    """`kind`, or a class of it and torch's `DistributedSampler`, if that is imported."""
    torchs = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
    if torchs is None or issubclass(kind, torchs):
        return kind
    for made, plain in _CLASS_WITHOUT_TORCH.items():
        if plain is kind:
            return made
    both = type(kind.__name__, (kind, torchs), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    _CLASS_WITHOUT_TORCH[both] = kind
    return both


def _unpickle(kind: type[ElasticDistributedSampler]) -> ElasticDistributedSampler:
    return kind.__new__(kind)


def _argument_or_variable(value: int | None, argument: str, variable: str) -> int:
    if value is not None:
        return value
    text = os.environ.get(variable)
    if text is None:
        raise UserError(f"{argument} is not given and {variable} is not set; give it, or run under a launcher")
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{variable}={text!r} is not a whole number; give {argument}, or set it to one") from None
