"""`docs/gpu.md`, made from the results of one run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from tests.gpu.rows import FAILED, NOT_RUN, PASSED, VERSION

_HEAD = """\
# On GPUs

This page shows the results of one run of `make gpu` on NVIDIA GPUs. [Run it on your machines](how-to/gpus.md): it takes
at most eight minutes.
"""
_REHEARSED = """
**We have not recorded a run on a GPU yet.** The tables come from a machine without a GPU, on which
`python -m tests.gpu --rehearse` ran the checks that work on processors, with gloo instead of NCCL. Such a run tests the
command but says nothing about GPUs: a check counts as run only after it has run on a machine with a GPU.
"""


def page_of(text: str) -> str:
    """The page.

    Args:
        text: results, as `rows.write_results` writes them.

    Raises:
        ValueError: they are of another version.
    """
    found = json.loads(text)
    if found["version"] != VERSION:
        raise ValueError(f"these results have version {found['version']}, where {VERSION} is known")
    rehearsed, rows = found["rehearsed"], found["rows"]
    lines = [_HEAD + (_REHEARSED if rehearsed else ""), *_machine(found), "", *_summary(rows, rehearsed=rehearsed)]
    for group, members in groupby(rows, key=lambda row: row["group"]):
        lines += ["", f"## {group[:1].upper()}{group[1:]}", "", *_table(members, rehearsed=rehearsed)]
    return "\n".join([*lines, ""])


def _machine(found: dict[str, Any]) -> list[str]:
    machine = found["machine"]
    gpus = [f"{gpu['name']}, {gpu['memory'] / (1 << 30):.0f} GiB" for gpu in machine["gpus"]]
    kinds = [f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)]
    facts = {
        "date": found["at"].replace("T", " ").replace("+00:00", " UTC"),
        "GPUs": "; ".join(kinds) or "none",
        "driver": machine["driver"] or "none",
        "processors": machine["cpus"],
        "kernel": machine["kernel"],
        "Python": machine["python"],
        "PyTorch": machine["torch"],
        "CUDA, NCCL": f"{machine['cuda'] or 'none'}, {machine['nccl'] or 'none'}",
        "Rallypoint": f"{machine['rallypoint']} ({machine['commit']})",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {_cell(str(value))} |" for name, value in facts.items())]


def _summary(rows: list[dict[str, Any]], *, rehearsed: bool) -> list[str]:
    count = {state: sum(row["state"] == state for row in rows) for state in (PASSED, FAILED, NOT_RUN)}
    where = "On processors" if rehearsed else "On this machine"
    return [f"{where}: {count[PASSED]} passed, {count[FAILED]} failed, {count[NOT_RUN]} not run."]


def _table(rows: Iterable[dict[str, Any]], *, rehearsed: bool) -> list[str]:
    state = "on a GPU | on processors" if rehearsed else "state"
    lines = [f"| check | expected | {state} | observed |", "|---|---|---|---|" + ("---|" if rehearsed else "")]
    for row in rows:
        states = f"{NOT_RUN} | {row['state']}" if rehearsed else f"{row['state']}"
        lines.append(f"| {_cell(row['what'])} | {_cell(row['expected'])} | {states} | {_cell(row['seen'])} |")
    return lines


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for markup."""
    for character in "\\|*_`<>[]$":
        text = text.replace(character, f"\\{character}")
    return text
