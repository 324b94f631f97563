"""The machine under test: its GPUs as nvidia-smi and torch list them, and versions."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rallypoint.base.version import __version__

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT = 120.0
_FIELDS = "index,uuid,pci.bus_id,name,memory.total,driver_version"


@dataclass(frozen=True)
class Gpu:
    """A GPU: `address` on the PCI bus, memory in bytes."""

    name: str
    uuid: str
    address: str
    memory: int


@dataclass(frozen=True)
class Machine:
    """`gpus` are those that torch sees, `listed` those of nvidia-smi."""

    gpus: tuple[Gpu, ...]
    listed: tuple[Gpu, ...]
    cpus: int
    kernel: str
    driver: str
    python: str
    torch: str
    cuda: str
    nccl: str
    rallypoint: str
    commit: str


def environment() -> dict[str, str]:
    """Variables by which other processes find this tree."""
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, inherited.split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def describe() -> Machine:
    """The machine, as nvidia-smi and torch see it. Raises RuntimeError: torch cannot be imported."""
    command = [sys.executable, "-m", "tests.gpu.programs.describe"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT, env={**os.environ, **environment()}, check=False
    )
    if done.returncode:
        raise RuntimeError(f"torch cannot be used by {sys.executable}: {done.stderr.strip()[-500:]}")
    torch = json.loads(done.stdout.splitlines()[-1])
    listed, driver = _listed()
    system = os.uname()
    return Machine(
        gpus=tuple(Gpu(gpu["name"], gpu["uuid"], gpu["address"], gpu["memory"]) for gpu in torch["gpus"]),
        listed=listed,
        cpus=len(os.sched_getaffinity(0)),
        kernel=f"{system.release} {system.machine}",
        driver=driver,
        python=sys.version.split()[0],
        torch=torch["torch"],
        cuda=torch["cuda"],
        nccl=torch["nccl"],
        rallypoint=__version__,
        commit=_commit(),
    )


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _listed() -> tuple[tuple[Gpu, ...], str]:
    text = nvidia_smi(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if len(row) == 6]
    gpus = tuple(Gpu(name, uuid, address_of(bus), int(memory) << 20) for _, uuid, bus, name, memory, _ in rows)
    return gpus, rows[0][-1] if rows else ""


def address_of(bus_id: str) -> str:
    """`00000000:07:00.0`, as nvidia-smi writes it, in the form of the kernel: `0000:07:00.0`."""
    return bus_id.lower()[-12:]


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
