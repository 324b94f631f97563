"""Where figures were measured, and where they are written: of a whole run, and of one that takes several sittings."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.case import Row

# The machine: without it the figures mean nothing


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


# The results of a run as JSON, with every value behind every median

FOLDER = Path(__file__).resolve().parent / "results"


def write(rows: list[Row], machine: Machine, quick: bool, path: Path | None = None) -> Path:
    """Write one file, named by the time of writing unless `path` says otherwise, and return its path."""
    now = time.gmtime()
    content = {
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        "machine": asdict(machine),
        "quick": quick,
        "rows": [_plain(row) for row in rows],
    }
    if path is None:
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / time.strftime("%Y%m%dT%H%M%SZ.json", now)
    path.write_text(_text(content), encoding="utf-8")
    return path


def _text(content: dict[str, Any]) -> str:
    """As JSON with one row a line, so that a difference shows the rows that changed."""
    head = json.dumps({**content, "rows": []}, indent=2, ensure_ascii=False)
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    return head.removesuffix("[]\n}") + f"[\n{rows}\n  ]\n}}\n"


def _plain(row: Row) -> dict[str, object]:
    sides = {"ours": row.ours, "base": row.base}
    return {
        "what": row.what,
        "unit": row.unit,
        **{name: {"median": side.median, "values": side.values} if side else None for name, side in sides.items()},
        "base_name": row.base_name or "torchrun",
        "never": row.never,
        "ratio": row.ratio,
        "budget": str(row.budget) if row.budget else None,
        "verdict": row.verdict,
        "remarks": row.remarks,
    }


# A run of everything that takes several sittings: what has been measured is kept after each benchmark. All rows that
# are kept are of one machine with one set of software; of another one there are none

_FILE = FOLDER / "unfinished.json"


class Unfinished(msgspec.Struct):
    """The rows of the benchmarks that are done, by name."""

    machine: Machine
    rows: dict[str, list[Row]]


def begin(machine: Machine, go_on: bool, path: Path = _FILE) -> Unfinished:
    """What an earlier sitting has left, if it is to be gone on with and was on this machine; else nothing."""
    if go_on and path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=Unfinished)
        if _same(found.machine, machine):
            return found
    return Unfinished(machine, {})


def keep(run: Unfinished, name: str, rows: list[Row], path: Path = _FILE) -> None:
    """One more benchmark is done."""
    run.rows[name] = rows
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(run))
    draft.replace(path)


def finish(path: Path = _FILE) -> None:
    """All are done: the next run begins with nothing."""
    path.unlink(missing_ok=True)


def _same(one: Machine, other: Machine) -> bool:
    """Whether only the load differs."""
    return replace(one, load_average=other.load_average) == other
