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

from benchmarks.case import number
from benchmarks.chart import PATH as CHART

README = CHART.parent.parent / "README.md"
BEGIN, END = "<!-- FIGURES, written by make bench -->", "<!-- END OF FIGURES -->"

LABELS = {
    "worker SIGKILL to restarted workers' first line, one node": "one of two workers is killed, until the new ones run",
    "the same over two nodes": "the same, the workers on two nodes",
    "command to first line of the last of 2 workers": "start of two workers",
}
"""The rows that are shown, by what they are called in the table, and what they are called here. A lost node is in the
README's picture, where the workers train: torchrun comes back once their collectives have failed."""


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
            f"Medians of {rounds} rounds, in turn, {machine['cores']} cores, torch {machine['torch']}, {day}: "
            "[the chart](docs/bench.svg), [all figures](benchmarks/README.md).",
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
