"""Process groups and training: NCCL over our store, DDP with autocast and `torch.compile`, ranks that share a GPU."""

from __future__ import annotations

from typing import Any

from tests.gpu.jobs import RALLYRUN, Done, program, run
from tests.gpu.rows import Bench, Check, Needs, Unexpected

_GROUP = "training"


def workers(bench: Bench) -> int:
    """One for each GPU; two in a rehearsal."""
    return 2 if bench.rehearsed else len(bench.machine.gpus)


def collectives(bench: Bench, *flags: str, size: int) -> Done:
    """Run the program of collectives. Raises Unexpected: a rank has failed, or has another result."""
    done = run([*RALLYRUN, *flags, program("collectives"), bench.backend])
    told = [event for event in done.events if event["event"] == "collectives"]
    if done.code or not told or not all(event["right"] and event["world_size"] == size for event in told):
        raise Unexpected(f"exit code {done.code}, {told}, {done.err[-600:]}")
    return done


def _nccl(bench: Bench) -> str:
    size = workers(bench)
    done = collectives(bench, "--standalone", f"--nproc-per-node={size}", size=size)
    event = done.events[0]
    return (
        f"{event['backend']}, world size {size}: right; {event['gigabytes_a_second']} GB/s; {done.seconds:.1f} s in all"
    )


def trained(bench: Bench, *arguments: str, size: int, name: str, flags: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Train to the end; returns the steps. Raises Unexpected: the job fails, or the loss does not fall."""
    folder = bench.new_folder(name)
    command = [*RALLYRUN, "--standalone", f"--nproc-per-node={size}", *flags, program("training")]
    done = run([*command, f"--device={bench.device}", f"--checkpoint-dir={folder}", *arguments])
    steps = [event for event in done.events if event["event"] == "step"]
    if done.code or not steps:
        raise Unexpected(f"exit code {done.code} after {len(steps)} steps: {done.err[-600:]}")
    if not steps[-1]["loss"] < steps[0]["loss"]:
        raise Unexpected(f"the loss does not fall: {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}")
    return steps


def _ddp(bench: Bench) -> str:
    size = workers(bench)
    steps = trained(bench, f"--backend={bench.backend}", "--compile", "--stop-after=60", size=size, name="ddp")
    return f"{len(steps)} steps, loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}"


def _shared(bench: Bench) -> str:
    steps = trained(bench, "--backend=gloo", "--stop-after=40", size=2, name="shared")
    return f"{len(steps)} steps, loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}"


_ANYWHERE = Needs(rehearsal=True)
CHECKS = (
    Check(
        _GROUP,
        "NCCL through init_process_group with our store, one rank per GPU",
        "all_reduce, broadcast and barrier are correct on all ranks",
        _nccl,
        _ANYWHERE,
    ),
    Check(_GROUP, "DDP of a transformer, autocast, torch.compile", "the loss decreases", _ddp, _ANYWHERE),
    Check(_GROUP, "two ranks on one GPU, gloo between them", "the loss decreases", _shared, _ANYWHERE),
)
