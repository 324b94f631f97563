"""Where the figures were measured; without it they mean nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine and the software whose speed the figures depend on. Memory in MiB."""

    cpu: str
    cores: int
    memory: int
    kernel: str
    python: str
    torch: str
    uvloop: str
    msgspec: str
    load_average: tuple[float, float, float]
    """When the run began: a busy machine explains a wide spread."""

    def __str__(self) -> str:
        load = " ".join(f"{value:.2f}" for value in self.load_average)
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory:,} MiB; Linux {self.kernel}; Python {self.python}; "
            f"torch {self.torch}; load average at the start {load}"
        )


def this_machine() -> Machine:
    """The machine that asks, as it is now."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=_version("torch"),
        uvloop=_version("uvloop"),
        msgspec=_version("msgspec"),
        load_average=os.getloadavg(),
    )


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in {"model name", "Model"}:
                return value.strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
