"""Splits a dataset among the workers of an elastic job and orders the samples. For workers; does not import torch.

Laws:

1. The order of an epoch is that of `torch.randperm` on a CPU with the same seed. So workers that use torch's sampler
   and workers that use ours can share an epoch.
2. The order does not depend on whether the process has imported torch. If it has, torch computes the order, which is
   5 to 20 times faster, but only if it shuffles a sample as we do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import cycle, islice
from random import Random
from typing import Any, Generic, Self, TypeVar

from rallypoint.base.errors import UserError

T = TypeVar("T")

_STATE_SIZE = 624
_WORD = 0xFFFFFFFF


class ElasticDistributedSampler:
    """Gives each worker its share of a dataset's indices, starting at `start_index`, shuffled anew for each epoch.

    Every worker gets the same number of indices; if the dataset does not divide evenly, some indices are used twice.
    The order is that of torch's sampler of the same name. Pass it to a `DataLoader` as `sampler`. If torch's samplers
    are already imported, it is also a `torch.utils.data.DistributedSampler`, which trainers check before they set the
    epoch.

    Args:
        dataset: an object with a length.
        num_replicas: how many workers share the dataset; `WORLD_SIZE` by default.
        rank: the rank of this worker among them; `RANK` by default.
        start_index: the first index to process, to continue an epoch.

    Raises:
        UserError: a number is out of range, or neither the argument nor the variable is set.
    """

    def __new__(cls, *_arguments: object, **_named: object) -> Self:
        kind: Any = _torch_subclass(cls)
        sampler: Self = object.__new__(kind)
        return sampler

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
            raise UserError(f"num_replicas={self.num_replicas} is out of range; set it to 1 or more")
        if not 0 <= self.rank < self.num_replicas:
            raise UserError(f"Invalid rank {self.rank}, rank should be in the interval [0, {self.num_replicas - 1}]")
        if start_index < 0:
            raise UserError(f"Start index {start_index} is negative; pass the index of the first sample to process")
        if start_index >= len(dataset):
            raise UserError(f"Start index {start_index} should be less than dataset size {len(dataset)}")
        self.num_samples = -(-(len(dataset) - start_index) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order; all workers must set the same one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        left = len(self.dataset) - self.start_index
        order = permutation(left, self.epoch)
        if self.start_index:
            order = [self.start_index + index for index in order]
        return islice(cycle(order), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        """How many indices this worker gets per epoch."""
        return self.num_samples


_CLASS_WITHOUT_TORCH: dict[type, type] = {}
"""The plain class of each class that also derives from torch's. Pickles name the plain class."""


def _torch_subclass(kind: type) -> type:
    """`kind`, or a subclass of it and of torch's `DistributedSampler` if that has been imported."""
    torchs = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
    if torchs is None or issubclass(kind, torchs):
        return kind
    for subclass, plain in _CLASS_WITHOUT_TORCH.items():
        if plain is kind:
            return subclass
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
        raise UserError(f"neither {argument} nor {variable} is set; pass {argument}, or run under a launcher")
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{variable}={text!r} is not a whole number; correct it, or pass {argument}") from None


class CyclingIterator(Generic[T], Iterator[T]):
    """Iterates over what `generator_fn` returns for one epoch after another.

    Args:
        n: the number of epochs; the last one is `n - 1`.
        generator_fn: returns the items of an epoch; called when the epoch starts (for the first one, immediately).
        start_epoch: the first epoch, to continue a job.
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


def permutation(n: int, seed: int) -> list[int]:
    """The numbers from 0 to `n - 1`, shuffled like `torch.randperm`.

    Args:
        n: how many; fewer than 2**32 / 20, because torch shuffles larger ranges differently.
        seed: only the lowest 32 bits are used, as in torch.
    """
    torch = _torch_that_shuffles_alike()
    return _shuffle(n, seed) if torch is None else _shuffle_with(torch, n, seed)


def _shuffle(n: int, seed: int) -> list[int]:
    shuffled = list(range(n))
    draw = _generator(seed).getrandbits
    for place in range(n - 1):
        other = place + draw(32) % (n - place)
        shuffled[place], shuffled[other] = shuffled[other], shuffled[place]
    return shuffled


_SAMPLE = 100
_asked: Any = None
"""The torch module that shuffled a sample."""
_alike = False
"""Whether it shuffled the sample as we do."""


def _torch_that_shuffles_alike() -> Any:
    """torch, if this process has imported it and it shuffles as we do; a future version may not."""
    global _asked, _alike
    torch = sys.modules.get("torch")
    if not hasattr(torch, "randperm") or not hasattr(torch, "Generator"):  # or not completely imported yet
        return None
    if _asked is not torch:
        _asked, _alike = torch, _shuffle_with(torch, _SAMPLE, _SAMPLE) == _shuffle(_SAMPLE, _SAMPLE)
    return torch if _alike else None


def _shuffle_with(torch: Any, n: int, seed: int) -> list[int]:
    # Our own generator and an explicit device leave the process's random state and default device unchanged.
    generator = torch.Generator(device="cpu").manual_seed(seed & _WORD)
    shuffled: list[int] = torch.randperm(n, generator=generator, device="cpu").tolist()
    return shuffled


def _generator(seed: int) -> Random:
    """Python's Mersenne twister, seeded like its authors' code; `Random(seed)` seeds differently."""
    words = [seed & _WORD]
    for place in range(1, _STATE_SIZE):
        last = words[-1]
        words.append((1812433253 * (last ^ (last >> 30)) + place) & _WORD)
    generator = Random()
    generator.setstate((3, (*words, _STATE_SIZE), None))
    return generator
