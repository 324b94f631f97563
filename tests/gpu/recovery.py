"""From a killed worker to the next step, beside torchrun; the dead worker's memory on the device; leftovers and aborts.

All ranks share GPU 0, so that every machine with a GPU can run this: gloo carries the gradients, and each rank has an
NCCL group of its own, which must be aborted when the round ends.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.case import BenchError
from benchmarks.children import descendants
from benchmarks.preload import is_zygote

from rallypoint.base.devices import cuda_devices
from rallypoint.base.nvml import nvml_kept_open, nvml_memory
from tests.gpu.jobs import RALLYRUN, RESUME, TORCHRUN, Job, program, running
from tests.gpu.rows import Bench, Check, Needs, Unexpected

_GROUP = "recovery"
_STEPS = 12
"""Steps before the kill: one checkpoint is there then."""
_READY = "a standby worker is ready"
_PRELOADED = "Preloaded for restarted workers"


@dataclass(frozen=True)
class Variant:
    """A way to come back. `ready` is written by the agent once it can, where workers do not wait for that."""

    name: str
    launcher: tuple[str, ...] = RALLYRUN
    flags: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    ready: str = ""

    @property
    def continues(self) -> bool:
        """Whether the other worker continues in its process."""
        return "--resumable" in self.arguments


_COLD = Variant("cold")
_AS_SOON = 1.1
"""Both import torch and make a CUDA context, which takes nearly all of the time and varies by a tenth."""
_TORCHRUN = Variant("torchrun", launcher=TORCHRUN)
_VARIANTS = (
    _TORCHRUN,
    _COLD,
    Variant("--preload=torch", flags=("--preload=torch,torch._dynamo",)),
    Variant("--preload=auto", flags=("--preload=auto",), ready=_PRELOADED),
    Variant("in-process", flags=("--preload=torch,torch._dynamo",), arguments=("--resumable",)),
    Variant(
        "in-process --standby=1, no CUDA context before the round",
        flags=("--standby=1",),
        arguments=("--resumable", "--prepare=host"),
        ready=_READY,
    ),
    Variant(
        "in-process --standby=1, CUDA context created in advance",
        flags=("--standby=1",),
        arguments=("--resumable", "--prepare=device"),
        ready=_READY,
    ),
)


def _command(bench: Bench, variant: Variant, folder: Path, *arguments: str) -> list[str]:
    nccl = [] if bench.rehearsed else ["--own-nccl"]
    return [
        *(*variant.launcher, "--standalone", "--nproc-per-node=2", "--max-restarts=3", *variant.flags),
        *(program("training"), f"--device={bench.device}", "--backend=gloo", *nccl),
        *(f"--checkpoint-dir={folder}", *variant.arguments, *arguments),
    ]


def _one_gpu() -> dict[str, str]:
    """The variables by which a job sees the first GPU of this run alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {"CUDA_VISIBLE_DEVICES": visible}


def _opened(pid: int) -> list[str]:
    """The device files that a process has open."""
    found = []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if (path := os.readlink(f"/proc/{pid}/fd/{name}")).startswith(("/dev/nvidia", "/dev/dxg")):
                    found.append(path)
    return found


def _resumes(variant: Variant, bench: Bench) -> str:
    folder = bench.new_folder(f"recovery-{len(os.listdir(bench.folder))}")
    with running(_command(bench, variant, folder), _one_gpu()) as job:
        job.step(_STEPS)
        if variant.ready:
            job.until_written(variant.ready)
        _expect_no_context_in_zygote(job)
        before = dict(job.pids)
        began = time.monotonic()
        os.kill(before[1], signal.SIGKILL)
        try:
            seconds = job.next_step(began)
            job.step(_STEPS + 3, RESUME)
        except BenchError as error:
            if variant is not _TORCHRUN:
                raise
            bench.figures[variant.name] = RESUME
            return f"never resumed, given {RESUME:.0f} s: {error}"
    kept = job.pids[0] == before[0]
    if kept != variant.continues:
        raise Unexpected(f"{seconds:.2f} s; rank 0 was {'kept' if kept else 'restarted'}")
    bench.figures[variant.name] = seconds
    theirs = bench.figures.get(_TORCHRUN.name)
    if theirs and seconds > theirs * (_AS_SOON if variant is _COLD else 1.0):
        raise Unexpected(f"{seconds:.2f} s, torchrun {theirs:.2f} s")
    told = "" if theirs is None or variant is _TORCHRUN else f", {seconds / theirs:.3f} of torchrun's {theirs:.2f} s"
    return f"{seconds:.3f} s{told}{', rank 0 kept its process and tensors' if kept else ''}"


def _expect_no_context_in_zygote(job: Job) -> None:
    for pid in filter(is_zygote, descendants(job.agent.pid)):
        if files := _opened(pid):
            raise Unexpected(f"the process that workers are forked from has {files[0]} open before the fork")


def _memory_is_free(flags: tuple[str, ...], bench: Bench) -> str:
    """Each worker takes most of what is free: a new one has no room beside the dead one."""
    folder = bench.new_folder(f"memory-{len(os.listdir(bench.folder))}")
    command = _command(bench, Variant("memory", flags=flags), folder, "--fill=0.7")
    command[command.index("--nproc-per-node=2")] = "--nproc-per-node=1"
    with running(command, _one_gpu()) as job:
        first = job.event("memory", RESUME)[1]["free"]
        job.step(2)
        began = time.monotonic()
        os.kill(job.pids[0], signal.SIGKILL)
        freed = "" if bench.rehearsed else f"; the driver had freed it after {_freed(first, began):.3f} s"
        at, event = job.event("memory", RESUME)
        short = first - event["free"]
        told = f"{short >> 20} MiB less than at the start, {at - began:.3f} s after the kill{freed}"
        if job.agent.has_written("the restart waited"):
            told += "; the restart waited for it"
        if short > first // 20 and _NO_WAIT not in flags:
            raise Unexpected(told)
        if _NO_WAIT not in flags:
            job.step(2, RESUME)
    return "the new worker has started" if bench.rehearsed else told


def _freed(first: int, began: float) -> float:
    """Seconds until the first GPU of this run has most of its memory free again."""
    uuid = cuda_devices(_one_gpu())[0].uuid
    with nvml_kept_open():
        while time.monotonic() < began + RESUME:
            (gpu,) = [gpu for gpu in nvml_memory() if gpu.uuid == uuid]
            if gpu.total is None or gpu.used is None:
                raise Unexpected("NVML does not know the memory in use")
            if gpu.total - gpu.used > first * 0.9:
                return time.monotonic() - began
            time.sleep(0.001)
    raise Unexpected(f"the memory was not free within {RESUME:.0f} s")


_NO_WAIT = "--gpu-memory-timeout=0"
_MEMORY: dict[tuple[str, ...], str] = {
    (): "as much as at the start",
    ("--preload=torch,torch._dynamo",): "as much as at the start",
    ("--preload=torch,torch._dynamo", _NO_WAIT): "shows why there is a wait",
}
_EXPECTED = {
    _TORCHRUN.name: "the baseline for the next rows",
    _COLD.name: "at most a tenth later than under torchrun: both import torch",
}
_ANYWHERE = Needs(rehearsal=True)
CHECKS = (
    *(
        Check(
            _GROUP,
            f"free memory when a new worker starts: {' '.join(flags) or 'cold'}",
            expected,
            partial(_memory_is_free, flags),
            _ANYWHERE,
        )
        for flags, expected in _MEMORY.items()
    ),
    *(
        Check(
            _GROUP,
            f"SIGKILL to the next step: {variant.name}",
            _EXPECTED.get(variant.name, "sooner than under torchrun"),
            partial(_resumes, variant),
            _ANYWHERE,
        )
        for variant in _VARIANTS
    ),
)
