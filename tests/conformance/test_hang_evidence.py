"""A hang of real torch over gloo: stacks and flight recorders name the rank and collective that are missing."""

from __future__ import annotations

import os
import pickle
import re
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from rallypoint.observe.hangs.dumps import read_dump, record_of
from rallypoint.observe.hangs.messages import NodeEvidence, RankEvidence
from rallypoint.observe.hangs.report import report_lines
from rallypoint.observe.hangs.unpickle import unpickled
from tests.jobs.launching import Job, Launcher
from tests.processes import completed

RECORDED = Path(__file__).parents[1] / "unit/hangs/recorded"
TRAIN = """
import torch
import torch.distributed as dist
from torch.distributed.elastic.control_plane import worker_main

from data import load

@worker_main()
def main():
    dist.init_process_group("gloo")
    data = torch.ones(1)
    dist.all_reduce(data)
    print("up", flush=True)
    if dist.get_rank() == 3:
        load()
    dist.all_reduce(data)
    dist.destroy_process_group()

main()
"""
DATA = """
def load():
    with open("held") as file:
        return file.read()
"""


def test_the_rank_that_waits_elsewhere_is_told_in_two_lines(launcher: Launcher, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    launcher.script(DATA, "data.py")
    script = launcher.script(TRAIN, "train.py")
    flags = ("--hang-timeout=8", "--flight-recorder", "--log-dir=logs", "--standalone", "--nproc-per-node=4")
    with TemporaryDirectory(prefix="rp-", dir="/tmp") as short:  # the path of a socket has 107 bytes at most
        hangs_and_goes_on(launcher(*flags, script, env={"TMPDIR": short}), tmp_path / "held")
    (kept,) = tmp_path.glob("logs/*/attempt_0/flight_recorder")
    assert sorted(each.name for each in kept.iterdir()) == [f"worker_server_{rank}.json" for rank in range(4)]


def test_torchs_own_analysis_names_the_same_rank_by_the_command_that_is_told(tmp_path: Path) -> None:
    """Of dumps that torch has recorded over gloo, with what NCCL's have beside: members of groups, and states."""
    for rank in range(4):
        dump = pickle.loads((RECORDED / f"missing_{rank}").read_bytes())
        members = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("undefined", [0, 1]), "2": ("tensor", [2, 3])}
        dump["pg_config"] = {
            name: {"name": name, "desc": description, "ranks": str(ranks)}
            for name, (description, ranks) in members.items()
            if rank in ranks
        }
        for entry in dump["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("gloo", "nccl")
            entry["state"] = "completed" if entry["retired"] else "started"
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    records = []
    for rank in range(4):
        with (tmp_path / f"rank_{rank}").open("rb") as file:
            records.append(record_of(rank, read_dump(unpickled(file, 60))))
    node = NodeEvidence("n1", tuple(RankEvidence(rank, "sleeping") for rank in range(4)), "", tuple(records))
    told = report_lines([msgspec.structs.replace(node, dumps=f"{tmp_path}/rank_")])
    assert "  flight recorder: all_reduce #3 of default_pg (train.py:46): joined by ranks 0-2, not by rank 3" in told
    (command,) = [line.removeprefix("  analysis: ") for line in told if line.startswith("  analysis: ")]
    program, *arguments = command.split()
    path = Path(sysconfig.get_path("scripts")) / program
    done = completed([path, *arguments], check=True)
    text = done.stdout + done.stderr
    assert "Not all ranks joining collective, sequence number: 3" in text
    assert "missing ranks: {3}" in text


def hangs_and_goes_on(job: Job, held: Path) -> None:
    job.until(lambda lines: lines.count("up") == 4, "all have met")
    told = "flight recorder: all_reduce #2 of default_pg: joined by ranks 0-2, not by rank 3"
    job.until_err(told)
    lines = [re.sub(r"^\S+ \S+ +\d+ \S+\] ", "", line) for line in job.err.splitlines()]
    at = lines.index(f"  {told}")
    assert lines[at - 2 : at] == [
        "  3 ranks (0-2): all_reduce, train.py:16",
        "  1 rank (3): load, data.py:3  <- differs",
    ]
    with held.open("w"):
        pass
    assert job.ends() == 0, job.err
