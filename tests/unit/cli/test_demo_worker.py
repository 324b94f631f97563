"""The demo's program: its result does not depend on the number of workers."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rallypoint.cli.demo.worker import Peers, PeersError, TrainingProgress, arguments, gradient, share
from rallypoint.store.client import TCPStore
from tests.waiting import at_once


def test_shares_do_not_depend_on_the_number_of_workers() -> None:
    options = arguments(["--batch=60"])
    whole = share(5, options, 0, 1)
    assert sorted(sample for rank in range(3) for sample in share(5, options, rank, 3)) == sorted(whole)
    assert share(6, options, 0, 1) != whole


def test_gradient() -> None:
    weights = [((7 * place) % 11 - 5) / 10 for place in range(49)]
    samples = [-1.0, 0.3, 2.0]
    *slopes, squares = gradient(weights, samples)
    step = 1e-6
    for place in (0, 1, 2, 30, 48):
        moved = [weight + step * (number == place) for number, weight in enumerate(weights)]
        assert (gradient(moved, samples)[-1] - squares) / step == pytest.approx(2 * slopes[place], abs=1e-3)


def test_a_pipe_of_one_page_holds_few_steps(tmp_path: Path) -> None:
    """A worker that the demo kills at a step must not finish before."""
    path = tmp_path / "progress"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        TrainingProgress(path, 0).report("step", step=1)
        line = os.read(pipe, mmap.PAGESIZE)
    finally:
        os.close(pipe)
    assert json.loads(line)["step"] == 1
    assert line.endswith(b"\n")
    assert 900 < len(line) < 1200, "room for the first lines of all workers, and for some steps"


def together(count: int, work: Callable[[Peers, int], None]) -> list[BaseException | None]:
    """Run `work` for each of `count` peers; return their errors."""
    with TCPStore("127.0.0.1", 0, is_master=True) as store:

        def run(rank: int) -> PeersError | None:
            peers = Peers(rank, count, ("127.0.0.1", store.port))
            try:
                work(peers, rank)
            except PeersError as error:
                return error
            finally:
                peers.close()
            return None

        return [*at_once(*(partial(run, rank) for rank in range(count)))]


def test_sum() -> None:
    sums: dict[int, tuple[float, ...]] = {}

    def work(peers: Peers, rank: int) -> None:
        sums[rank] = peers.sum([0.1 * rank, 1.0])

    assert together(3, work) == [None] * 3
    assert sums[0] == sums[1] == sums[2] == pytest.approx((0.3, 3.0))


def test_a_missing_peer_is_an_error() -> None:
    def work(peers: Peers, rank: int) -> None:
        peers.sum([1.0])
        if rank != 1:
            peers.sum([1.0])

    raised = together(3, work)
    assert raised[1] is None
    assert all(isinstance(error, PeersError) for error in (raised[0], raised[2]))
