"""The figures in the README: some rows of `docs/bench.json` as a table, between two markers.

    python -m benchmarks.figures

writes it anew; a run of everything does so by itself. No figure in the README is typed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.chart import PATH as CHART
from benchmarks.table import number

README = CHART.parent.parent / "README.md"
BEGIN, END = "<!-- FIGURES, written by make bench -->", "<!-- END OF FIGURES -->"

LABELS = {
    "worker SIGKILL to restarted workers' first line, one node": "a worker is killed, until the new ones run",
    "the same over two nodes": "the same over two nodes",
    "worker SIGKILL to the next training step, one node of two workers: rallyrun": "until the next training step (DDP)",
    "worker SIGKILL to the next training step, one node of two workers: rallyrun, in-process": "the same, in-process",
    "agent SIGKILL to survivors' new workers' first line": "an agent is killed, until the other nodes go on",
    "link down to the same (lease 3 s)": "a node's network is cut, until the others go on",
    "third agent's start to all new workers' first line": "a node joins, until all work together",
    "command to first line of the last of 2 workers": "start of two workers",
    "memory of agent and helpers, 2 idle workers (PSS)": "memory of the agent",
    "rendezvous of 64 nodes": "64 nodes meet",
    "store, 1,024 plain sockets: requests": "worker store, 1,024 clients",
    "--tee 3 from 8 workers: lines of 100 bytes": "`--tee` of 8 workers",
}
"""The rows that are shown, by what they are called in the table, and what they are called here."""


def block(results: Mapping[str, Any]) -> str:
    """The table, with its markers.

    Args:
        results: what `docs/bench.json` has.
    """
    machine, day = results["machine"], results["written"][:10]
    rounds = " or ".join(map(str, sorted({len(row["ours"]["values"]) for row in results["rows"] if row["ours"]})))
    return "\n".join(
        [
            BEGIN,
            "",
            "| | rallyrun | torchrun |",
            "|---|---|---|",
            *_lines(results["rows"]),
            "",
            f"Medians of {rounds} rounds, by turns, on {machine['cores']} cores ({machine['cpu']}), "
            f"Python {machine['python']}, torch {machine['torch']}, {day}.",
            "`make bench` measures them; [all of them, and how](benchmarks/README.md).",
            "",
            END,
        ]
    )


def _lines(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """In the order of `LABELS`; what was not measured is left out."""
    found = {row["what"]: row for row in rows}
    for what, label in LABELS.items():
        row = found.get(what)
        if row is not None and row["ours"] is not None:
            theirs = _figure(row["base"]["median"], row["unit"]) if row["base"] else row["never"] or "-"
            yield f"| {label} | {_figure(row['ours']['median'], row['unit'])} | {theirs} |"


def _figure(value: float, unit: str) -> str:
    return f"{value * 1000:.0f} ms" if unit == "s" and value < 1 else f"{number(value)} {unit}"


def write(results: Mapping[str, Any], path: Path = README) -> Path:
    """Put the table into the README, and return where that is.

    Raises:
        ValueError: it has no such markers.
    """
    text, count = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block(results), path.read_text(), flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{path} has the markers of the figures {count} times; it has to have them once")
    path.write_text(text)
    return path


if __name__ == "__main__":
    print(f"written to {write(json.loads(CHART.with_suffix('.json').read_text()))}")
    sys.exit(0)
