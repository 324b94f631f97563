"""The drawings of a report's page. Pure: a report in, SVG out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rallypoint.base.log import printable
from rallypoint.observe.goodput import JobPhase, NodeEntry, Report, Span
from rallypoint.observe.report_text import percent
from rallypoint.observe.status import duration

WIDTH, _LEFT, _RIGHT = 1000, 150, 12
_ROW, _BAR, _AXIS = 20, 14, 22
"""Heights: of a row, of what is drawn in it, of the axis."""
_MAX_NODES = 64
"""Rows of nodes that are drawn; those with failures first."""
_MAX_LABELS = 40
_MIN_WIDTH = 0.3

COLOURS: Mapping[str, str] = {
    "productive": "#2f7d5b",
    "running": "#2f7d5b",
    "lost_work": "url(#lost)",
    "starting": "#cfe3f4",
    "stopping": "#d29a1e",
    "rendezvous": "url(#rendezvous)",
    "held_back": "url(#held)",
    "down": "#ffffff",
}

PATTERNS = """<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="lost" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#f0a08a"/><rect width="2.4" height="6" fill="#b23a1f"/></pattern>
<pattern id="rendezvous" width="5" height="5" patternUnits="userSpaceOnUse">
<rect width="5" height="5" fill="#e6e9ee"/><circle cx="2.5" cy="2.5" r="1" fill="#7d8896"/></pattern>
<pattern id="held" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<rect width="6" height="6" fill="#d8cdf0"/><rect width="1.6" height="6" fill="#6a4fb3"/></pattern>
</defs></svg>"""


def breakdown(report: Report) -> str:
    """One bar: productive time, and what the rest was lost to."""
    phases = report.phases
    parts = [
        ("productive", report.productive),
        ("lost_work", phases[JobPhase.RUNNING] - report.productive),
        *((each.value, phases[each]) for each in JobPhase if each is not JobPhase.RUNNING),
    ]
    rects, at = [], 0.0
    for name, seconds in parts:
        width = WIDTH * seconds / report.wall if report.wall else 0.0
        if width > 0:
            title = f"{name.replace('_', ' ')}: {duration(seconds)}, {percent(seconds, report.wall)}"
            rects.append(_rect(at, 0, width, 26, name, title))
        at += width
    return _svg(28, "where the time went", [*rects, f'<rect x="0" y="0" width="{WIDTH}" height="26" {_FRAME}/>'])


def timeline(report: Report) -> Iterator[str]:
    """The job's row and one for each node, over one axis; and a sentence where nodes are left out."""
    shown = sorted(report.nodes, key=lambda each: not each.failures)[:_MAX_NODES]
    rows = [each for each in report.nodes if each in shown] if len(report.nodes) > _MAX_NODES else list(report.nodes)
    height = _AXIS + _ROW * (len(rows) + 1) + 18
    scale = _Scale(report.wall)
    parts = [*_axis(scale, height - 16), *_round_marks(report, scale, height - 16)]
    parts += _row("job", with_lost_work(report), _AXIS, scale)
    for number, node in enumerate(rows, 1):
        top = _AXIS + _ROW * number
        parts += _row(node.name, node.spans, top, scale)
        parts += _failures(node, top, scale)
    yield _svg(height, "rounds and nodes", parts)
    left = len(report.nodes) - len(rows)
    if left:
        yield f'<p class="lead">{left} more nodes are left out; those with failures are shown first.</p>'


def progress_chart(report: Report) -> str:
    """The steps that were reached, over the same axis."""
    height, top = 150, 8
    scale, points = _Scale(report.wall), sorted(report.progress)
    low, high = min(step for _, step in points), max(step for _, step in points)
    span = max(1, high - low)

    def y(step: int) -> float:
        return top + (height - 40) * (1 - (step - low) / span)

    lines, begun = [], [points[0]]
    for before, each in itertools.pairwise(points):
        if any(before[0] < entry.started <= each[0] for entry in report.rounds):
            lines.append(begun)
            begun = []
        begun.append(each)
    lines.append(begun)
    parts = list(_axis(scale, height - 18, top))
    for step in dict.fromkeys((low, (low + high) // 2, high)):
        at = y(step)
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" class="dim">{step}</text>')
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e8ee"/>')
    for line in lines:
        places = [(f"{scale.x(at):.1f}", f"{y(step):.1f}") for at, step in line]
        path = " ".join(f"{across},{down}" for across, down in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#2f7d5b" stroke-width="1.6"/>')
        parts += [f'<circle cx="{across}" cy="{down}" r="1.4" fill="#2f7d5b"/>' for across, down in places[:400]]
    return _svg(height, "progress: step over time", parts)


def with_lost_work(report: Report) -> list[Span]:
    """The job's timeline, with what ran and did not survive set apart: the last of what ran in a round."""
    lost = {index: entry.lost for index, entry in enumerate(report.rounds)}
    found: list[Span] = []
    for span in reversed(report.timeline):
        part = min(span.seconds, lost.get(span.round, 0.0)) if span.phase == JobPhase.RUNNING else 0.0
        if part > 0:
            lost[span.round] -= part
            found.append(span._replace(start=span.end - part, phase="lost_work"))
        if span.seconds > part:
            found.append(span._replace(end=span.end - part))
    found.reverse()
    return found


class _Scale:
    """From seconds to places."""

    def __init__(self, wall: float) -> None:
        self.wall = wall or 1.0

    def x(self, seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * seconds / self.wall

    def ticks(self) -> list[float]:
        """Moments at round numbers of seconds, minutes or hours, about eight of them."""
        rough = self.wall / 8
        steps: list[float] = [k * 10**e for e in range(-3, 1) for k in (1, 2, 5)] + [10, 15, 30]
        steps += [60 * k for k in (1, 2, 5, 10, 20, 30, 60, 120, 240, 360, 720)] + [86400 * k for k in (1, 2, 7, 30)]
        step = next((each for each in steps if each >= rough), rough)
        return [step * number for number in range(math.floor(self.wall / step) + 1)]


def _axis(scale: _Scale, bottom: float, top: float = _AXIS - 4) -> Iterator[str]:
    for tick in scale.ticks():
        x = scale.x(tick)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#d8dee6" stroke-width=".7"/>'
        words = duration(tick) if tick >= 10 or tick == int(tick) else f"{tick:g}s"
        yield f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle" class="dim">{words if tick else "0"}</text>'


def _round_marks(report: Report, scale: _Scale, bottom: float) -> Iterator[str]:
    last = -math.inf
    labels = 0
    for entry in report.rounds:
        x = scale.x(entry.started)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_AXIS - 6}" y2="{bottom}" stroke="#5a6676" stroke-width=".5" '
        yield 'stroke-dasharray="2 2"/>'
        if x - last > 22 and labels < _MAX_LABELS:
            last, labels = x, labels + 1
            yield f'<text x="{x + 2:.1f}" y="{_AXIS - 9}" class="dim">{entry.number}</text>'
    yield f'<text x="{_LEFT - 8}" y="{_AXIS - 9}" text-anchor="end" class="dim">round</text>'


def _row(name: str, spans: Sequence[Span], top: float, scale: _Scale) -> Iterator[str]:
    label = name if len(name) <= 22 else f"{name[:21]}…"
    yield f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{_escaped(label)}'
    yield f"<title>{_escaped(name)}</title></text>"
    for span in spans:
        x = scale.x(span.start)
        width = scale.x(span.end) - x
        if span.phase != JobPhase.DOWN:
            title = f"{span.phase.replace('_', ' ')}: {span.seconds:.2f} s, from +{duration(span.start)}"
            yield _rect(x, top + 2, max(width, _MIN_WIDTH), _BAR, span.phase, title)


def _failures(node: NodeEntry, top: float, scale: _Scale) -> Iterator[str]:
    for at, text in node.failures:
        x = scale.x(at)
        yield (
            f'<path d="M{x:.1f} {top + _BAR + 1} l-4 -{_BAR - 4} h8 z" fill="#1c2430" stroke="#fff" stroke-width=".6">'
            f"<title>+{duration(at)} {_escaped(text)}</title></path>"
        )


_FRAME = 'fill="none" stroke="#5a6676" stroke-width=".5"'


def _rect(x: float, y: float, width: float, height: float, name: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{COLOURS[name]}">'
        f"<title>{_escaped(title)}</title></rect>"
    )


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _escaped(text: str) -> str:
    return escape(printable(text))
