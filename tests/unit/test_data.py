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


def test_an_epoch_may_be_empty_and_many_may() -> None:
    assert list(CyclingIterator(3, lambda epoch: [] if epoch == 1 else [epoch])) == [0, 2]
    assert list(CyclingIterator(100_000, lambda epoch: [epoch] if epoch == 99_999 else [])) == [99_999]


@given(st.integers(0, 300), st.integers(-(2**70), 2**70))
def test_a_permutation_holds_each_number_once(n: int, seed: int) -> None:
    assert sorted(permutation(n, seed)) == list(range(n))
    assert permutation(n, seed) == permutation(n, seed + 2**32)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 59), st.integers(0, 3))
def test_all_is_shared_out_and_everybody_gets_as_many(size: int, workers: int, start: int, epoch: int) -> None:
    start = min(start, size - 1)
    shares = []
    for rank in range(workers):
        sampler = ElasticDistributedSampler(range(size), workers, rank, start)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler) == sampler.num_samples
    given_out = Counter(index for share in shares for index in share)
    assert set(given_out) == set(range(start, size))
    assert len({len(share) for share in shares}) == 1
    assert max(given_out.values()) - min(given_out.values()) <= 1


@pytest.mark.process
def test_without_torch_a_sampler_is_a_plain_one() -> None:
    program = (
        "import pickle, sys; from rallypoint.data import ElasticDistributedSampler as Sampler\n"
        "made = Sampler(range(5), 2, 1); again = pickle.loads(pickle.dumps(made))\n"
        "print(type(made) is Sampler, list(again) == list(made), 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True True False\n"


def test_the_environment_has_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_numbers_out_of_bounds(workers: int, rank: int, start: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ElasticDistributedSampler(range(3), workers, rank, start)


class _Torch:
    """Shuffles with `shuffle`, in the place of torch."""

    def __init__(self, shuffle: Callable[[int, int], list[int]]) -> None:
        self._shuffle, self.asked = shuffle, 0

    class Generator:
        def __init__(self, device: str) -> None:
            assert device == "cpu", "whatever the default device is"
            self.seed = 0

        def manual_seed(self, seed: int) -> Self:
            self.seed = seed
            return self

    def randperm(self, n: int, *, generator: Generator, device: str) -> SimpleNamespace:
        assert device == "cpu"
        self.asked += 1
        return SimpleNamespace(tolist=lambda: self._shuffle(n, generator.seed))


def test_torch_shuffles_only_if_it_does_so_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ours = permutation(1000, 7)
    shuffle = data._shuffle
    torchs = [_Torch(shuffle), _Torch(lambda n, seed: shuffle(n, seed)[::-1])]
    for torch in torchs:
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert permutation(1000, 7) == permutation(1000, 7 + 2**32) == ours
    assert [torch.asked for torch in torchs] == [3, 1]
