"""The coordinator's agent dies at each of its steps, one after the other: the others always finish the job."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster, running
from tests.jobs.launching import Launcher, launching
from tests.jobs.nodes import NAMES, SCRIPT, Node, all_up

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
    flags += [f"--rdzv-endpoint={etcd.endpoints[0]}", "--rdzv-conf=lease=4,last_call_timeout=1"]
    events = rallyrun.folder / "events"
    flags += [f"--event-log-handler=jsonl:{events}/"]
    script = rallyrun.script(f"NAMES = {NAMES!r}\n{SCRIPT}")
    (rallyrun.folder / "fail-B-0").touch()
    environment = {"LOGLEVEL": "INFO", "DIES_AT": str(step), "PYTHONPATH": str(Path(__file__).parents[2])}
    dying = [sys.executable, "-m", "tests.faults.dying"]
    first = Node("A", rallyrun.command([*dying, *flags, script], {**environment, "NODE": "A"}))
    first.job.until_err("this agent is the coordinator", or_end=True)
    others = [Node(each, rallyrun(*flags, script, env={"LOGLEVEL": "INFO", "NODE": each})) for each in "BC"]
    all_up(others)
    (rallyrun.folder / "finish").touch()  # not before: a node that comes when the others have finished waits in vain
    codes = {node.name: node.job.ends() for node in (first, *others)}
    assert codes in ({"A": -signal.SIGKILL, "B": 0, "C": 0}, {"A": 0, "B": 0, "C": 0}), [n.job.err for n in others]
    assert (codes["A"] == 0) == ("it had" in first.job.err)
    check_rounds([first, *others], round_names(events))


def round_names(events: Path) -> dict[str, str]:
    """The round of each worker, by its pid, as the agents' events name it.

    An address and a port name no round: the kernel may give the store of a later round the port of an earlier one.
    """
    names: dict[str, str] = {}
    for file in events.iterdir():
        origin = ""
        for line in file.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # the agent was killed while it wrote this
                continue
            event = json.loads(line)
            if event["event"] == "round_started":
                origin = event["origin"]
            elif event["event"] == "workers_started":
                names |= {str(pid): f"{origin} {event['round']}" for pid in event["pids"]}
    return names


def check_rounds(nodes: list[Node], names: dict[str, str]) -> None:
    """A rank of a round is held once, a round is as large as its workers say, and a failure was counted once."""
    rounds, named = defaultdict(list), defaultdict(set)
    ups = [up for node in nodes for up in node.ups]
    for up in ups:
        assert up["TORCHELASTIC_RESTART_COUNT"] in ("0", "1")
        if up["pid"] in names:
            named[up["MASTER_ADDR"], up["MASTER_PORT"]].add(names[up["pid"]])
    for up in ups:
        possible = {names[up["pid"]]} if up["pid"] in names else named[up["MASTER_ADDR"], up["MASTER_PORT"]]
        if len(possible) == 1:  # otherwise its agent was killed before its last events were written
            rounds[next(iter(possible))].append(up)
    assert rounds
    for members in rounds.values():
        ranks = [int(up["RANK"]) for up in members]
        assert len(set(ranks)) == len(ranks), rounds
        (size,) = {int(up["WORLD_SIZE"]) for up in members}
        assert max(ranks) < size, rounds
