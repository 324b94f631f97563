"""Tables of figures in the documents: rows of `docs/bench.json`, each table between two markers.

    python -m benchmarks.figures

rewrites them; a run of all benchmarks does so automatically. No benchmark figure is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.case import number
from benchmarks.chart import PATH as CHART

ROOT = CHART.parent.parent
END = "<!-- END OF FIGURES -->"

START = {
    "worker SIGKILL to restarted workers' first line, one node": "restart after one of two workers is killed",
    "the same over two nodes": "the same with the workers on two nodes",
    "command to first line of the last of 2 workers": "start of two workers",
}
"""Labels of the README's rows, by their names in the results. The README's picture shows a lost node: its workers
train, and torchrun recovers once their collectives have failed."""
MANY_WORKERS = {
    "one of 64 workers in C killed, to the last new one": "64 workers",
    "one of 256 workers in C killed, to the last new one": "256 workers",
    "one of 256 workers in C killed, to the last new one, busy processors": "256 workers, both processors busy",
}
_SIZES = ("1,024", "4,096", "12,500")
_OF_A_NODE = {
    "server's processor time a node": "first round: from the connection to the placement",
    "the same for a failure and the next round": "a failure, until all nodes are notified and have new placements",
    "the same for coming back after a cut": "all nodes reconnect after a cut during which they missed their placement",
    "messages a node": "messages",
    "bytes a node": "bytes",
    "server's memory a node": "the server's memory",
}

Results = Mapping[str, Any]


def _beside_torchrun(labels: Mapping[str, str], results: Results) -> list[str]:
    return [
        "| | rallyrun | torchrun |",
        "|---|---|---|",
        *_lines(results["rows"], labels),
        "",
        _conditions(results, labels, "alternating rounds"),
    ]


def _of_a_node(results: Results) -> list[str]:
    """The coordinator's cost per node in large jobs."""
    found = {row["what"]: row for row in results["rows"]}
    lines = [f"| per node | {' | '.join(f'{size} nodes' for size in _SIZES)} |", "|---|---|---|---|"]
    for what, label in _OF_A_NODE.items():
        rows = [found[f"{size} nodes: {what}"] for size in _SIZES]
        cells = " | ".join(_figure(row["ours"]["median"], row["unit"]) for row in rows)
        lines.append(f"| {label} | {cells} |")
    return [*lines, "", _conditions(results, [f"{size} nodes: {what}" for size in _SIZES for what in _OF_A_NODE])]


TABLES: Mapping[str, tuple[str, Callable[[Results], list[str]]]] = {
    "start": ("README.md", lambda results: _beside_torchrun(START, results)),
    "many-workers": ("docs/how-far.md", lambda results: _beside_torchrun(MANY_WORKERS, results)),
    "scale": ("docs/how-far.md", _of_a_node),
}
"""The document of each table, and the function that makes its lines."""


def block(name: str, results: Results) -> str:
    """A table with its markers. `results` is the content of `docs/bench.json`."""
    return "\n".join([f"<!-- FIGURES {name}, written by make bench -->", "", *TABLES[name][1](results), "", END])


def _conditions(results: Results, whats: Container[str], unit: str = "rounds") -> str:
    machine, day = results["machine"], results["written"][:10]
    shown = [row for row in results["rows"] if row["what"] in whats and row["ours"]]
    counts = " or ".join(map(str, sorted({len(row["ours"]["values"]) for row in shown})))
    return f"Medians of {counts} {unit} on {machine['cores']} cores with torch {machine['torch']}, {day}."


def _lines(rows: list[Mapping[str, Any]], labels: Mapping[str, str]) -> Iterator[str]:
    """In the order of the labels, without rows that were not measured."""
    found = {row["what"]: row for row in rows}
    for what, label in labels.items():
        row = found.get(what)
        if row is not None and row["ours"] is not None:
            theirs = _figure(row["base"]["median"], row["unit"]) if row["base"] else row["never"] or "-"
            yield f"| {label} | {_figure(row['ours']['median'], row['unit'])} | {theirs} |"


def _figure(value: float, unit: str) -> str:
    return f"{value * 1000:.0f} ms" if unit == "s" and value < 1 else f"{number(value)} {unit}"


def write(results: Results, root: Path = ROOT) -> list[Path]:
    """Write the tables into the documents in a folder, and return the documents' paths.

    Raises:
        ValueError: a document does not contain the markers of its table exactly once.
    """
    for name, (document, _) in TABLES.items():
        path = root / document
        begin = f"<!-- FIGURES {name}, written by make bench -->"
        text, count = re.subn(
            f"{re.escape(begin)}.*?{re.escape(END)}",
            lambda _, name=name: block(name, results),  # type: ignore[misc]
            path.read_text(),
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"{path} must contain the markers of the figures {name!r} once, not {count} times")
        path.write_text(text)
    return sorted({root / document for document, _ in TABLES.values()})


if __name__ == "__main__":
    print(*write(json.loads(CHART.with_suffix(".json").read_text())), sep="\n")
    sys.exit(0)
