"""Our view of the devices, beside that of torch and nvidia-smi."""

from __future__ import annotations

import json
import os
import re

from rallypoint.base.devices import cuda_count, cuda_devices
from rallypoint.base.numa import parse_cpus
from rallypoint.base.nvml import nvml_fabrics
from tests.gpu.jobs import RALLYCTL, RALLYRUN, Done, program, run
from tests.gpu.machine import nvidia_smi
from tests.gpu.rows import Bench, Check, Unexpected

_GROUP = "devices"


def _listed(bench: Bench) -> str:
    ours = [(gpu.uuid, gpu.address) for gpu in cuda_devices({})]
    theirs = [(gpu.uuid, gpu.address) for gpu in bench.machine.listed]
    if ours != theirs:
        raise Unexpected(f"ours: {ours}; nvidia-smi: {theirs}")
    return f"{len(ours)} ({', '.join(sorted({gpu.name for gpu in bench.machine.listed}))})"


def _seen_by_torch(bench: Bench) -> str:
    ours = [(gpu.uuid, gpu.address) for gpu in cuda_devices(os.environ)]
    theirs = [(gpu.uuid, gpu.address or at) for gpu, (_, at) in zip(bench.machine.gpus, ours, strict=False)]
    if ours != theirs:
        raise Unexpected(f"ours: {ours}; torch: {theirs}")
    return ", ".join(uuid for uuid, _ in ours)


def _visible(bench: Bench) -> str:
    uuid, last = bench.machine.listed[0].uuid, len(bench.machine.listed) - 1
    values = [
        "0",
        str(last),
        uuid,
        uuid[:12],
        "",
        "-1",
        "NoDevFiles",
        "0,0",
        f"0,{last + 1}",
        str(last + 1),
        f" {uuid} ",
    ]
    values += ["GPU-00000000", f"{uuid},0", ",0", "0,", "0x0", "+0", "00"]
    done = run([*RALLYRUN[:1], program("visible"), *values])
    theirs = {event["value"]: event["count"] for event in done.events}
    if len(theirs) < len(set(values)):
        raise Unexpected(f"CUDA answered for {len(theirs)} of {len(values)} values: {done.err[-300:]}")
    differing = [
        f"{value!r}: ours {ours}, CUDA {count}"
        for value, count in theirs.items()
        if (ours := cuda_count({"CUDA_VISIBLE_DEVICES": value})) != count
    ]
    if differing:
        raise Unexpected("; ".join(differing))
    return f"{len(theirs)} values, the same count for each"


def _starts(*flags: str, env: dict[str, str] | None = None) -> Done:
    command = [*RALLYRUN, "--standalone", *flags, "--no-python", "/bin/sh", "-c", "echo world=$WORLD_SIZE"]
    return run(command, env=env)


def _worlds(done: Done) -> list[int]:
    return [int(found) for found in re.findall(r"world=(\d+)", done.out)]


def _per_gpu(bench: Bench) -> str:
    count = len(bench.machine.gpus)
    for kind in ("gpu", "auto"):
        done = _starts(f"--nproc-per-node={kind}")
        if _worlds(done) != [count] * count:
            raise Unexpected(f"--nproc-per-node={kind}: {_worlds(done)} for {count} GPUs: {done.err[-300:]}")
    return f"{count} worker{'s' if count > 1 else ''} with each"


def _without_visible(bench: Bench) -> str:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    refused = _starts("--nproc-per-node=gpu", env=hidden)
    if refused.code == 0 or "Traceback" in refused.err:
        raise Unexpected(f"gpu: exit code {refused.code}, {refused.err[-300:]}")
    worlds = _worlds(_starts("--nproc-per-node=auto", env=hidden))
    if worlds != [bench.machine.cpus] * bench.machine.cpus:
        raise Unexpected(f"auto: {len(worlds)} workers for {bench.machine.cpus} processors")
    return f"gpu: {refused.err.strip().splitlines()[-1]}; auto: {len(worlds)} workers, as many as processors"


def _by_uuid(bench: Bench) -> str:
    uuid = bench.machine.listed[-1].uuid
    done = _starts("--nproc-per-node=gpu", env={"CUDA_VISIBLE_DEVICES": uuid})
    if _worlds(done) != [1]:
        raise Unexpected(f"{_worlds(done)}: {done.err[-300:]}")
    return f"1 worker for {uuid}"


def _virtual_local_rank(bench: Bench) -> str:
    count = len(bench.machine.gpus)
    done = run([*RALLYRUN, "--standalone", f"--nproc-per-node={count}", "--virtual-local-rank", program("placed")])
    seen = [(event["local_rank"], *event["uuids"]) for event in done.events]
    if sorted(seen) != sorted((0, gpu.uuid) for gpu in bench.machine.gpus):
        raise Unexpected(f"{seen}: {done.err[-300:]}")
    return f"{count} worker{'s' if count > 1 else ''} of local rank 0, each with one GPU of its own"


def _check_verb(bench: Bench) -> str:
    done = run([*RALLYCTL, "check", "--json"])
    rows = {row["name"]: row for row in json.loads(done.out)["checks"]}
    gpus = rows["gpus"]
    named = all(gpu.name in gpus["fact"] for gpu in bench.machine.listed)
    if gpus["status"] not in {"PASS", "WARN"} or not named or bench.machine.driver not in gpus["fact"]:
        raise Unexpected(f"{gpus['status']} {gpus['fact']}")
    shown = (f"{row['status']} {name}: {row['fact']}" for name, row in rows.items() if name in _OF_GPUS)
    return "; ".join(shown)


_OF_GPUS = ("gpus", "gpu-memory", "xid")


def _numa(bench: Bench) -> str:
    command = [*RALLYRUN, "--standalone", f"--nproc-per-node={len(bench.machine.gpus)}", "--numa-binding=node"]
    done = run([*command, program("placed")])
    if done.code:
        raise Unexpected(done.err.strip()[-400:])
    for event in done.events:
        address = bench.machine.listed[event["local_rank"]].address
        near = _near(address) & os.sched_getaffinity(0)
        if set(event["cpus"]) != near:
            raise Unexpected(
                f"local rank {event['local_rank']}: processors {event['cpus']}, near the GPU: {sorted(near)}"
            )
    return f"{len(done.events)} bound, to {sorted({len(event['cpus']) for event in done.events})} processors"


def _near(address: str) -> set[int]:
    """The processors of the NUMA node of a PCI device; all where the kernel knows of none."""
    try:
        with open(f"/sys/bus/pci/devices/{address}/local_cpulist", encoding="utf-8") as file:
            return set(parse_cpus(file.read().strip())) or os.sched_getaffinity(0)
    except OSError:
        return os.sched_getaffinity(0)


def _fabric(bench: Bench) -> str:
    ours = nvml_fabrics()
    text = nvidia_smi("-q")
    states = re.findall(r"^\s+Fabric\n\s+State\s+: (.+)$", text, re.MULTILINE)
    completed = [state.strip() == "Completed" for state in states]
    if len(ours) != len(bench.machine.listed):
        raise Unexpected(f"{ours} for {len(bench.machine.listed)} GPUs")
    if any(ours) and not any(completed):
        raise Unexpected(f"ours: {ours}; nvidia-smi: {states}")
    return f"domains {sorted(set(ours))}; nvidia-smi: {sorted({state.strip() for state in states}) or 'no fabric'}"


CHECKS = (
    Check(_GROUP, "GPUs in the machine", "UUIDs and PCI addresses as nvidia-smi lists them", _listed),
    Check(_GROUP, "GPUs that a worker sees", "the same as in torch, in the same order", _seen_by_torch),
    Check(_GROUP, "CUDA_VISIBLE_DEVICES: index, UUID, empty, wrong", "the same count as in CUDA", _visible),
    Check(_GROUP, "--nproc-per-node=gpu and auto", "one worker per GPU", _per_gpu),
    Check(_GROUP, "gpu and auto, no GPU visible", "gpu is an error; auto counts processors", _without_visible),
    Check(_GROUP, "gpu, one GPU visible by its UUID", "one worker", _by_uuid),
    Check(_GROUP, "--virtual-local-rank", "each worker has local rank 0 and its own GPU", _virtual_local_rank),
    Check(_GROUP, "rallyctl check: the rows about GPUs", "the driver and names from nvidia-smi, no FAIL", _check_verb),
    Check(_GROUP, "--numa-binding=node", "the processors of the GPU's NUMA node", _numa),
    Check(_GROUP, "NVLink domain by NVML", "one per GPU that nvidia-smi shows in a fabric", _fabric),
)
