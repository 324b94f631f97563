"""The chart of the site: how many times better than torchrun, one bar a figure, as SVG.

Every bar is of one and the same run. It reads on a light page and on a dark one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.case import Row, number
from benchmarks.next_step import PRELOAD
from benchmarks.results import Machine

PATH = Path(__file__).resolve().parent.parent / "docs" / "bench.svg"

TITLES = {
    "--help, whole process": "--help",
    "command to first line of the last of 2 workers": "start of 2 workers",
    "memory of agent and helpers, 2 idle workers (PSS)": "agent's memory",
    "worker SIGKILL to restarted workers' first line, one node": "restart after a SIGKILL",
    "the same over two nodes": "the same over 2 nodes",
    "worker SIGKILL to restarted workers' first line after importing torch, preloaded": "importing torch, preloaded",
    "worker SIGKILL to the next training step, one node of two workers: rallyrun": "next training step",
    f"worker SIGKILL to the next training step, one node of two workers: rallyrun {PRELOAD}": "the same, preloaded",
    "worker SIGKILL to the next training step, one node of two workers: rallyrun, in-process": "the same, in-process",
    "agent SIGKILL to survivors' new workers' first line": "1 launcher of 3 killed, alone",
    "link down to the same (lease 3 s)": "a node's link down",
    "third agent's start to all new workers' first line": "a third node joins",
    "^C to the end of the last process, one node": "^C until all is gone",
    "rendezvous of 64 nodes": "64 nodes meet",
    "rendezvous of 256 nodes": "256 nodes meet",
    "store, 64 plain sockets: requests": "store, 64 clients",
    "store, 1,024 plain sockets: requests": "store, 1,024 clients",
    "store, 4,096 plain sockets: requests": "store, 4,096 clients",
    "store, start-up of 256 torch processes: all that they ask": "store, 256 processes start",
    "--tee 3 from 8 workers: lines of 100 bytes": "output of 8 workers, lines",
    "--tee 3 from 8 workers: bytes, in lines of 16 KiB": "output of 8 workers, bytes",
}
"""The rows that are shown, by what they are called in the table, and what they are called here."""

_WIDTH, _ROW, _TOP, _FOOT = 900, 24, 62, 46
_LABELS, _VALUES = 230, 280
_LEFT, _RIGHT = _LABELS + 12, _WIDTH - _VALUES
_LEAST, _MOST = 0.5, 1000.0
"""Times better, at the left and the right end of the scale. Where torchrun did not do it in time, there is no bar."""
_TICKS = (1, 10, 100, 1000)

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 11px; fill: #59636e }
  .grid { stroke: #d1d9e0 }
  .one { stroke: #59636e }
  .better { fill: #2da44e }
  .worse { fill: #bc4c00 }
  .spread { stroke: #1f2328; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .small { fill: #9198a1 }
    .grid { stroke: #3d444d }
    .one { stroke: #9198a1 }
    .better { fill: #3fb950 }
    .worse { fill: #db6d28 }
    .spread { stroke: #f0f6fc }
  }
"""


@dataclass(frozen=True, slots=True)
class _Bar:
    """One figure: how many times better ours is, with the worst and the best of our rounds."""

    title: str
    times: float
    worst: float
    best: float
    values: str


def draw(rows: Sequence[Row], machine: Machine, rounds: str) -> str:
    """The chart as SVG.

    Args:
        rows: of one run. Those of `TITLES` are shown, as far as they were measured.
        machine: where that was.
        rounds: what is to be said of the number of rounds.
    """
    bars = [bar for row in rows if (bar := _bar(row)) is not None]
    height = _TOP + _ROW * len(bars) + _FOOT
    middle = (
        f"{machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, Python {machine.python}, torch {machine.torch}"
    )
    foot = f"One run of make bench, in turn with torchrun; {rounds}; thin lines: the spread of ours. {_day()}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            'aria-label="How many times better than torchrun">',
            f"<style>{_STYLE}</style>",
            _text(12, 24, "How many times better than torchrun", "title"),
            *_scale(height - _FOOT),
            *(line for place, bar in enumerate(bars) for line in _drawn(bar, _TOP + _ROW * place)),
            _text(12, height - 24, middle, "small"),
            _text(12, height - 8, foot, "small"),
            "</svg>\n",
        ]
    )


def write(rows: Sequence[Row], machine: Machine, rounds: str, path: Path = PATH) -> Path:
    """Write the chart, and return where it is."""
    path.write_text(draw(rows, machine, rounds), encoding="utf-8")
    return path


def _bar(row: Row) -> _Bar | None:
    title = TITLES.get(row.what)
    if title is None or row.ours is None or (row.base is None and not row.never):
        return None
    ours = f"{number(row.ours.median)} {row.unit}"
    if row.base is None:
        return _Bar(title, math.inf, math.inf, math.inf, f"{ours}, torchrun {row.never}")
    times = [row.base.median / value for value in (row.ours.median, *row.ours.spread)]
    if row.budget is not None and row.budget.at_least:
        times = [1 / each for each in times]
    values = f"{ours}, torchrun {number(row.base.median)}"
    return _Bar(title, times[0], min(times), max(times), values)


def _at(times: float) -> float:
    """Where so many times better is, from the left."""
    share = math.log(min(max(times, _LEAST), _MOST) / _LEAST) / math.log(_MOST / _LEAST)
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)


def _scale(bottom: float) -> list[str]:
    lines = []
    for tick in _TICKS:
        at = _at(tick)
        kind = "one" if tick == 1 else "grid"
        lines.append(f'<line class="{kind}" x1="{at}" x2="{at}" y1="{_TOP - 8}" y2="{bottom}"/>')
        lines.append(_text(at, _TOP - 14, "torchrun" if tick == 1 else f"{tick:,} x", "small", "middle"))
    return lines


def _drawn(bar: _Bar, top: float) -> list[str]:
    base, end, middle = _at(1), _at(bar.times), top + _ROW / 2 - 2
    kind = "better" if bar.times >= 1 else "worse"
    lines = [_text(_LABELS, middle + 4, bar.title, "", "end")]
    if math.isinf(bar.times):
        return [*lines, _text(_RIGHT + 12, middle + 4, bar.values, "small")]
    lines += [
        f'<rect class="{kind}" x="{min(base, end)}" y="{top}" width="{max(1.0, abs(end - base)):.1f}" '
        f'height="{_ROW - 6}" rx="2"/>',
        _text(_RIGHT + 12, middle + 4, f"{number(bar.times)} x: {bar.values}", "small"),
    ]
    if bar.worst != bar.best:
        lines.append(f'<line class="spread" x1="{_at(bar.worst)}" x2="{_at(bar.best)}" y1="{middle}" y2="{middle}"/>')
    return lines


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{name} text-anchor="{anchor}">{escape(text)}</text>'


def _day() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
