"""The chart shows what the table says, reads on dark pages too, and says where and how it was measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks import chart
from benchmarks.machine import Machine
from benchmarks.stats import Sample
from benchmarks.table import Budget, Row

MACHINE = Machine("A processor & more", 2, 4096, "6.1", "3.11", "2.13", "0.23", "0.22", (0.1, 0.2, 0.3))
ROWS = [
    Row("--help, whole process", "s", Sample((0.1, 0.08, 0.2)), Sample((1.0,)), Budget(0.08)),
    Row("store, 64 plain sockets: requests", "/s", Sample((50.0,)), Sample((100.0,)), Budget(1.0, at_least=True)),
    Row("link down to the same (lease 3 s)", "s", Sample((3.2,)), None, never="never (waited 40 s)"),
    Row("memory of agent and helpers, 2 idle workers (PSS)", "MB", None, Sample((224.0,))),
    Row("nobody's figure", "s", Sample((1.0,)), Sample((1.0,))),
]
SVG = "{http://www.w3.org/2000/svg}"


def drawn() -> ElementTree.Element:
    return ElementTree.fromstring(chart.draw(ROWS, MACHINE, "medians of 3 rounds"))


def words(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def test_each_figure_that_was_measured_is_a_bar() -> None:
    root = drawn()
    kinds = [bar.get("class") for bar in root.iter(f"{SVG}rect")]
    assert kinds == ["better", "worse", "better"]
    told = words(root)
    assert "10.0 x: 0.100 s, torchrun 1.00" in told
    assert "0.500 x: 50.0 /s, torchrun 100" in told
    assert "3.20 s, torchrun never" in told
    assert not any("memory" in each or "nobody" in each for each in told)


def test_a_bar_that_is_longer_is_better_and_has_its_spread() -> None:
    root = drawn()
    first, second, never = (float(bar.get("width", "0")) for bar in root.iter(f"{SVG}rect"))
    assert never > first > 1
    assert second > 1
    (spread,) = [line for line in root.iter(f"{SVG}line") if line.get("class") == "spread"]
    bar = next(root.iter(f"{SVG}rect"))
    end = float(bar.get("x", "0")) + first
    assert float(spread.get("x1", "0")) < end < float(spread.get("x2", "0"))


def test_it_says_where_and_how_and_reads_on_a_dark_page() -> None:
    told = " ".join(words(drawn()))
    assert "A processor & more, 2 cores" in told
    assert "medians of 3 rounds" in told
    style = drawn().find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")


def test_it_is_written_where_the_readme_looks_for_it(tmp_path: Path) -> None:
    path = chart.write(ROWS, MACHINE, "medians of 3 rounds", tmp_path / "bench.svg")
    assert path.read_text().startswith("<svg")
    assert f"docs/{chart.PATH.name}" in (chart.PATH.parent.parent / "README.md").read_text()
