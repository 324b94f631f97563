"""The coordinator's agent dies at each of its steps, one after the other: the others always finish the job."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster, running
from tests.jobs.launching import Launcher, launching
from tests.jobs.nodes import NAMES, SCRIPT, Node

STEPS = range(1, 97, 1 if os.environ.get("RALLYPOINT_SWEEP") else 4)
"""An undisturbed coordinator has 70 to 90 steps in this job. `make sweep` takes each of them."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


@pytest.fixture
def rallyrun(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as launcher:
        yield launcher


@pytest.mark.parametrize("step", STEPS)
def test_the_others_finish_and_each_round_has_one_membership(rallyrun: Launcher, etcd: EtcdCluster, step: int) -> None:
    """One worker fails once, so that there are two rounds: formed, run, ended by a failure, formed again, finished."""
    name = rallyrun.mark[:8]
    flags = ["--nnodes=2:3", "--max-restarts=1", "--rdzv-backend=etcd", f"--rdzv-id={name}"]
    flags += [f"--rdzv-endpoint={etcd.endpoints[0]}", "--rdzv-conf=lease=2,last_call_timeout=1"]
    script = rallyrun.script(f"NAMES = {NAMES!r}\n{SCRIPT}")
    for what in ("fail-B-0", "finish"):
        (rallyrun.folder / what).touch()
    environment = {"LOGLEVEL": "INFO", "DIES_AT": str(step), "PYTHONPATH": str(Path(__file__).parents[2])}
    dying = [sys.executable, "-m", "tests.faults.dying"]
    first = Node("A", rallyrun.command([*dying, *flags, script], {**environment, "NODE": "A"}))
    first.job.until_err_or_end("this agent is the coordinator")
    others = [Node(each, rallyrun(*flags, script, env={"LOGLEVEL": "INFO", "NODE": each})) for each in "BC"]
    codes = {node.name: node.job.ends() for node in (first, *others)}
    assert codes in ({"A": -signal.SIGKILL, "B": 0, "C": 0}, {"A": 0, "B": 0, "C": 0}), [n.job.err for n in others]
    assert (codes["A"] == 0) == ("it had" in first.job.err)
    check_rounds([first, *others])


def check_rounds(nodes: list[Node]) -> None:
    """A rank of a round is held once, a round is as large as its workers say, and a failure was counted once."""
    rounds = defaultdict(list)
    for node in nodes:
        for up in node.ups:
            assert up["TORCHELASTIC_RESTART_COUNT"] in ("0", "1")
            rounds[up["MASTER_ADDR"], up["MASTER_PORT"]].append(up)
    for ups in rounds.values():
        ranks = [int(up["RANK"]) for up in ups]
        assert len(set(ranks)) == len(ranks), rounds
        (size,) = {int(up["WORLD_SIZE"]) for up in ups}
        assert max(ranks) < size, rounds
