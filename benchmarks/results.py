"""The results of a run as JSON, with every value behind every median and the machine that it was measured on."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.table import Row

FOLDER = Path(__file__).resolve().parent / "results"


def write(rows: list[Row], machine: Machine, quick: bool, path: Path | None = None) -> Path:
    """Write one file, named by the time of writing unless `path` says otherwise, and return its path."""
    import json

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
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


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
