"""The figures of the README are those of the last run of all benchmarks, which may take several sittings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import figures, results, unfinished
from benchmarks.chart import PATH as CHART
from benchmarks.stats import Sample
from benchmarks.table import Budget, Row

from tests.unit.benchmarks.test_chart import MACHINE

ROWS = [
    Row("start of 2 workers", "s", Sample((0.1,)), Sample((1.0,))),
    Row(
        "rendezvous of 64 nodes", "s", Sample((0.05, 0.04, 0.06)), Sample((1.386,)), Budget(0.1), remarks=("a remark",)
    ),
    Row("link down to the same (lease 3 s)", "s", Sample((3.2,)), None, never="never (waited 40 s)"),
    Row("memory of agent and helpers, 2 idle workers (PSS)", "MB", None, Sample((224.0,))),
]


def test_the_readme_has_the_figures_of_the_last_run() -> None:
    """Renew them by `python -m benchmarks.figures`, where a run of everything has not done so."""
    assert figures.block(json.loads(CHART.with_suffix(".json").read_text())) in figures.README.read_text()


def test_the_figures_are_those_that_were_measured(tmp_path: Path) -> None:
    """In the order of the labels, with never for what torchrun does not do, and nothing where ours is missing."""
    file = results.write(ROWS, MACHINE, False, tmp_path / "bench.json")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    figures.write(json.loads(file.read_text()), readme)
    lines = readme.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert [line for line in lines if line.startswith("| ") and "rallyrun" not in line] == [
        "| a node's network is cut, until the others go on | 3.20 s | never (waited 40 s) |",
        "| 64 nodes meet | 50 ms | 1.39 s |",
    ]
    assert "old" not in lines
    assert any("Medians of 1 or 3 rounds, by turns, on 2 cores (A processor & more)" in line for line in lines)


def test_a_readme_without_the_markers_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="0 times"):
        figures.write(json.loads(CHART.with_suffix(".json").read_text()), readme)
    assert readme.read_text() == "nothing"


def test_an_interrupted_run_is_gone_on_with_on_the_same_machine(tmp_path: Path) -> None:
    file = tmp_path / "results" / "unfinished.json"
    run = unfinished.begin(MACHINE, True, file)
    unfinished.keep(run, "one", ROWS[:2], file)
    unfinished.keep(run, "two", ROWS[2:], file)
    later = replace(MACHINE, load_average=(9.0, 9.0, 9.0))
    assert unfinished.begin(later, True, file).rows == {"one": ROWS[:2], "two": ROWS[2:]}
    assert unfinished.begin(later, False, file).rows == {}
    assert unfinished.begin(replace(MACHINE, torch="2.14"), True, file).rows == {}
    unfinished.finish(file)
    assert unfinished.begin(MACHINE, True, file).rows == {}
