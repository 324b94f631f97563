"""Samplers and iterators, without torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint import data
from rallypoint.base.errors import UserError
from rallypoint.data import CyclingIterator, ElasticDistributedSampler, permutation


def test_empty_epochs() -> None:
    assert list(CyclingIterator(3, lambda epoch: [] if epoch == 1 else [epoch])) == [0, 2]
    assert list(CyclingIterator(100_000, lambda epoch: [epoch] if epoch == 99_999 else [])) == [99_999]


@given(st.integers(0, 300), st.integers(-(2**70), 2**70))
def test_permutation(n: int, seed: int) -> None:
    assert sorted(permutation(n, seed)) == list(range(n))
    assert permutation(n, seed) == permutation(n, seed + 2**32)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 59), st.integers(0, 3))
def test_shares(size: int, workers: int, start: int, epoch: int) -> None:
    start = min(start, size - 1)
    shares = []
    for rank in range(workers):
        sampler = ElasticDistributedSampler(range(size), workers, rank, start)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler) == sampler.num_samples
    counts = Counter(index for share in shares for index in share)
    assert set(counts) == set(range(start, size))
    assert len({len(share) for share in shares}) == 1
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.process
def test_a_sampler_without_torch() -> None:
    program = (
        "import pickle, sys; from rallypoint.data import ElasticDistributedSampler as Sampler\n"
        "made = Sampler(range(5), 2, 1); again = pickle.loads(pickle.dumps(made))\n"
        "print(type(made) is Sampler, list(again) == list(made), 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True True False\n"


def test_rank_and_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = ElasticDistributedSampler(range(8))
    assert (sampler.rank, sampler.num_replicas) == (1, 4)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UserError, match="RANK='x' is not a whole number"):
        ElasticDistributedSampler(range(8))
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match="neither rank nor RANK is set"):
        ElasticDistributedSampler(range(8))


@pytest.mark.parametrize(
    ("workers", "rank", "start", "sentence"),
    [
        (2, 2, 0, "Invalid rank 2"),
        (2, -1, 0, "Invalid rank -1"),
        (0, 0, 0, "num_replicas=0"),
        (2, 0, 3, "Start index 3 should be less than dataset size 3"),
        (2, 0, -1, "Start index -1 is negative"),
    ],
)
def test_invalid_numbers(workers: int, rank: int, start: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ElasticDistributedSampler(range(3), workers, rank, start)


class _Torch:
    """A stand-in for torch that shuffles with `shuffle`."""

    def __init__(self, shuffle: Callable[[int, int], list[int]]) -> None:
        self._shuffle, self.calls = shuffle, 0

    class Generator:
        def __init__(self, device: str) -> None:
            assert device == "cpu"
            self.seed = 0

        def manual_seed(self, seed: int) -> Self:
            self.seed = seed
            return self

    def randperm(self, n: int, *, generator: Generator, device: str) -> SimpleNamespace:
        assert device == "cpu"
        self.calls += 1
        return SimpleNamespace(tolist=lambda: self._shuffle(n, generator.seed))


def test_torch_shuffles_only_with_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ours = permutation(1000, 7)
    shuffle = data._shuffle
    torchs = [_Torch(shuffle), _Torch(lambda n, seed: shuffle(n, seed)[::-1])]
    for torch in torchs:
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert permutation(1000, 7) == permutation(1000, 7 + 2**32) == ours
    assert [torch.calls for torch in torchs] == [3, 1]
