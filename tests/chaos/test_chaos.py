"""The invariants judge the record of a job correctly, and a job survives a few random faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from rallypoint.store.server import StoreServer
from tests.chaos.__main__ import play
from tests.chaos.faults import KINDS, Backend, plan
from tests.chaos.invariants import Life, breaches, current, is_whole
from tests.chaos.job import ChaosJob
from tests.ports import free_port


def lives(round_: str, begun: float, size: int = 2, *, seen: float = 10.0, first_pid: int = 1) -> list[Life]:
    return [Life(first_pid + rank, round_, rank, size, 0, begun, seen) for rank in range(size)]


def test_a_job_that_obeys_breaks_nothing_and_is_whole() -> None:
    record = lives("a:1", 0.0, seen=5.0) + lives("a:2", 5.5, seen=10.0, first_pid=3)
    assert list(breaches(record, 1.0)) == []
    assert is_whole(record, 2, 9.0)
    assert not is_whole(record, 2, 10.0)
    assert not is_whole(record, 3, 9.0)
    assert not is_whole(record[:-1], 2, 9.0)
    assert {each.pid for each in current(record).values()} == {3, 4}


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        ([*lives("a:1", 0.0), Life(9, "a:1", 0, 2, 0, 1.0, 2.0)], "two processes"),
        ([*lives("a:1", 0.0), Life(9, "a:1", 2, 3, 0, 0.0, 2.0)], "disagree on the number of workers"),
        ([*lives("a:1", 0.0), Life(9, "a:1", 2, 2, 0, 0.0, 2.0)], "rank 2 of 2"),
        ([Life(1, "a:1", 0, 2, 0, 0.0, 2.0), Life(2, "a:1", 1, 2, 1, 0.0, 2.0)], "number of failures"),
        (lives("a:1", 0.0, seen=8.0) + lives("a:2", 5.0, first_pid=3), "was seen 3.0 s after"),
    ],
)
def test_each_breach_is_found(record: list[Life], rule: str) -> None:
    assert any(rule in each for each in breaches(record, 1.0))


@pytest.mark.process
def test_two_rounds_at_one_address_are_two(tmp_path: Path) -> None:
    job, port = ChaosJob(tmp_path, Backend.C10D), free_port()
    (job.lives / "finish").touch()
    given = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0", "LIVES": str(job.lives)}
    env = os.environ | given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for _ in range(2):
        with StoreServer("127.0.0.1", port):
            subprocess.run([sys.executable, str(tmp_path / "worker.py")], env=env, check=True, timeout=90)
    assert len({each.round for each in job.read()}) == 2
    assert list(breaches(job.read(), 0.0)) == []


def test_a_seed_draws_the_same_plan_and_only_what_the_backend_has() -> None:
    for backend in Backend:
        drawn = plan(backend, 200, 5)
        assert drawn == plan(backend, 200, 5) != plan(backend, 200, 6)
        assert {each.kind for each in drawn} == {kind for kind in KINDS if backend in kind.backends}


@pytest.mark.process
@pytest.mark.etcd
@pytest.mark.parametrize("backend", list(Backend))
def test_a_job_survives_random_faults(tmp_path: Path, backend: Backend) -> None:
    assert play(tmp_path, backend, 6, 3, defaultdict(list)) == []
