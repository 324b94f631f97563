"""Checks that need several GPUs or several nodes: NVLink, several ranks of NCCL, GPUDirect, InfiniBand."""

from __future__ import annotations

import os
import re
import signal
import time

from tests.gpu.jobs import RALLYRUN, RESUME, program, run, running
from tests.gpu.machine import nvidia_smi
from tests.gpu.rows import Bench, Check, Needs, Unexpected
from tests.gpu.training import collectives

_SEVERAL, _NODES = "several GPUs", "several nodes"


def _nvlink(bench: Bench) -> str:
    links = re.findall(r"\bNV\d+\b", nvidia_smi("topo", "-m"))
    speed = collectives(
        bench, "--standalone", f"--nproc-per-node={len(bench.machine.gpus)}", size=len(bench.machine.gpus)
    ).events[0]["gigabytes_a_second"]
    return f"{f'links: {sorted(set(links))}' if links else 'no NVLink'}; all_reduce {speed} GB/s"


def _transport(bench: Bench) -> str:
    """How NCCL's ranks of one node reach each other, by its own log."""
    size = len(bench.machine.gpus)
    command = [*RALLYRUN, "--standalone", f"--nproc-per-node={size}", program("collectives"), "nccl"]
    done = run(command, env={"NCCL_DEBUG": "INFO"})
    ways = sorted(set(re.findall(r" via (P2P/\w+|SHM/\w+|NET/\w+(?:/\d+)?(?:/GDRDMA)?)", done.out + done.err)))
    if done.code or not ways:
        raise Unexpected(f"exit code {done.code}: {done.err[-300:]}")
    return ", ".join(ways)


def _ranks_that_continue(bench: Bench) -> str:
    """SIGKILL to one of several NCCL ranks; the others abort their communicator and continue in their processes."""
    size = len(bench.machine.gpus)
    folder = bench.new_folder("nccl-ranks")
    command = [*RALLYRUN, "--standalone", f"--nproc-per-node={size}", "--max-restarts=2"]
    command += [program("training"), "--backend=nccl", "--resumable", f"--checkpoint-dir={folder}"]
    with running(command) as job:
        job.step(12)
        before = dict(job.pids)
        began = time.monotonic()
        os.kill(before[size - 1], signal.SIGKILL)
        seconds = job.next_step(began)
        job.step(15, RESUME)
    kept = [rank for rank in range(size - 1) if job.pids[rank] == before[rank]]
    if len(kept) < size - 1:
        raise Unexpected(f"{seconds:.2f} s; of {size - 1} ranks that lived, {len(kept)} continued")
    return f"{seconds:.3f} s to the next step; {len(kept)} of {size - 1} ranks kept their processes"


def _on_each_node(bench: Bench, name: str) -> list[str]:
    workers = "2" if bench.rehearsed else "gpu"
    return [*RALLYRUN, *bench.nodes, f"--rdzv-id=gpu-{name}", f"--nproc-per-node={workers}", "--max-restarts=2"]


def _between_nodes(bench: Bench) -> str:
    command = [*_on_each_node(bench, "collectives"), program("collectives"), bench.backend]
    done = run(command, env={"NCCL_DEBUG": "INFO"})
    events = done.events
    ways = sorted(set(re.findall(r"NET/(?:IB|Socket|OFI)(?: : Using [^\n]*)?|GDRDMA", done.out + done.err)))
    if done.code or not events or not all(event["right"] for event in events):
        raise Unexpected(f"exit code {done.code}, {events}, {done.err[-600:]}")
    event = events[0]
    told = f"{bench.backend}, world size {event['world_size']}: right; {event['gigabytes_a_second']} GB/s"
    return "; ".join([told, *ways])


def _killed_between_nodes(bench: Bench) -> str:
    """Each node runs this; the last rank of the job's first start kills itself."""
    folder = bench.new_folder("nodes")
    command = [*_on_each_node(bench, "kill"), program("training"), f"--device={bench.device}"]
    command += [f"--backend={bench.backend}", f"--checkpoint-dir={folder}", "--die-at=20", "--stop-after=60"]
    done = run(command)
    starts = sum(event["event"] == "training" for event in done.events)
    workers = len({event["rank"] for event in done.events})
    if done.code or starts < 2 * workers:
        raise Unexpected(f"exit code {done.code}, {starts} starts of {workers} workers: {done.err[-600:]}")
    return f"{starts} starts of this node's {workers} workers; the job ended with exit code 0"


_ON_NODES = Needs(nodes=2, rehearsal=True)
CHECKS = (
    Check(_SEVERAL, "NVLink, and NCCL over all GPUs", "all_reduce is correct; its speed", _nvlink, Needs(gpus=2)),
    Check(_SEVERAL, "transport between NCCL ranks", "P2P or shared memory", _transport, Needs(gpus=2)),
    Check(
        _SEVERAL,
        "in-process: one of several NCCL ranks is killed",
        "all others keep their processes",
        _ranks_that_continue,
        Needs(gpus=2),
    ),
    Check(_NODES, "NCCL between nodes, and its network", "all_reduce is correct", _between_nodes, _ON_NODES),
    Check(_NODES, "the job's last rank is killed", "all workers restart and succeed", _killed_between_nodes, _ON_NODES),
)
