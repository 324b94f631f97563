"""A terminal session as one SVG that plays by itself, on light pages and on dark ones. Pure.

Laws:

1. Every row of the terminal is a strip of all that it ever showed, moved behind a window of its own by one animation of
   CSS: what does not change is drawn once.
2. Text keeps the columns of the terminal whatever font there is (`textLength`), and lines are drawn as lines.
3. Whoever wants no motion (`prefers-reduced-motion`), or has no CSS, sees the end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from html import escape

from docs.recording.cast import Cast
from docs.recording.frames import FAST, Frame, Row, Run

_CELL, _LINE, _MARGIN, _BAR = 8.4, 19, 14, 34
_HOLD = 8.0
"""Seconds for which the end is shown before it begins anew."""
_LINES = {"━": 3.0, "─": 1.2}
"""Characters that are lines, and how thick."""

_STYLE = """
.w{fill:#0d1117;stroke:#3d444d}.d{fill:#3d444d}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#d1d7e0;white-space:pre}
.l{stroke:#d1d7e0}.bold{font-weight:700;fill:#f0f6fc}.red{fill:#ff7b72}.green{fill:#3fb950}.brown{fill:#d29922}
.cyan{fill:#39c5cf}.brightblack{fill:#9198a1}.l.green{stroke:#3fb950}.l.brown{stroke:#d29922}.l.brightblack{stroke:#3d444d}
.l.red{stroke:#ff7b72}.t{fill:#9198a1}.f{fill:#d29922}
@media (prefers-reduced-motion:reduce){g{animation:none!important}}
"""


def draw(cast: Cast, frames: Sequence[Frame]) -> str:
    """The session as SVG.

    Args:
        cast: where it comes from, for size and title.
        frames: what was seen.
    """
    height = max(number for frame in frames for number, row in enumerate(frame.rows, 1) if row)
    seconds = frames[-1].at + _HOLD
    wide, high = round(cast.width * _CELL + 2 * _MARGIN), _BAR + height * _LINE + _MARGIN
    rows = [[(frame.at, frame.rows[number]) for frame in frames] for number in range(height)]
    strips = [_strip(number, states, seconds) for number, states in enumerate(rows)]
    fast = _strip(height, [(frame.at, _FAST_ROW if frame.fast else ()) for frame in frames], seconds)
    made = time.strftime("%Y-%m-%d", time.gmtime(cast.written))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
            'role="img">',
            f"<title>{escape(cast.command)}</title>",
            f"<desc>{escape(cast.title)}: recorded on {made} by make recording</desc>",
            f"<style>{_STYLE}g{{animation:{_figure(seconds)}s steps(1,end) infinite}}",
            *(keyframes for keyframes, _ in [*strips, fast]),
            "</style>",
            f'<rect class="w" x=".5" y=".5" width="{wide - 1}" height="{high - 1}" rx="8"/>',
            *(f'<circle class="d" cx="{18 + 16 * dot}" cy="17" r="5"/>' for dot in range(3)),
            f'<text class="t" x="{wide // 2}" y="22" text-anchor="middle">{escape(cast.command)}</text>',
            *(_window(_MARGIN, _BAR + number * _LINE, wide, body) for number, (_, body) in enumerate(strips)),
            _window(wide - 5 * _CELL, 7, 5 * _CELL, fast[1]),
            "</svg>\n",
        ]
    )


_FAST_ROW: Row = (Run(0, f"{FAST}x ", "f"),)


def _window(x: float, y: float, width: float, body: str) -> str:
    return f'<svg x="{_figure(x)}" y="{y}" width="{_figure(width)}" height="{_LINE}">{body}</svg>' if body else ""


def _strip(number: int, states: Sequence[tuple[float, Row]], seconds: float) -> tuple[str, str]:
    """The keyframes and the content of one row: all that it shows below one another, each once."""
    kinds: list[Row] = []
    steps: list[tuple[float, int]] = []
    for at, row in states:
        if row not in kinds:
            kinds.append(row)
        if not steps or steps[-1][1] != kinds.index(row):
            steps.append((at, kinds.index(row)))
    if kinds == [()]:
        return "", ""
    content = "".join(_runs(row, place * _LINE) for place, row in enumerate(kinds))
    if len(steps) == 1:
        return "", content
    moves = "".join(f"{_figure(100 * at / seconds)}%{{{_moved(place)}}}" for at, place in steps)
    last = steps[-1][1]
    keyframes = f"@keyframes r{number}{{0%{{{_moved(steps[0][1])}}}{moves}to{{{_moved(last)}}}}}"
    return keyframes, f'<g style="animation-name:r{number};{_moved(last)}">{content}</g>'


def _moved(place: int) -> str:
    return f"transform:translateY({-place * _LINE}px)" if place else "transform:none"


def _runs(row: Row, top: int) -> str:
    return "".join(part for run in row for part in _parts(run, top))


def _parts(run: Run, top: int) -> Iterator[str]:
    """One run as lines and as texts, which are parted where more than one space stands."""
    kind = f' class="{run.style}"' if run.style else ""
    for found in re.finditer(rf"([{''.join(_LINES)}])\1*|[^ {''.join(_LINES)}]+(?: [^ {''.join(_LINES)}]+)*", run.text):
        text, x = found[0], (run.column + found.start()) * _CELL
        if text[0] in _LINES:
            middle, end = _figure(top + _LINE / 2 + 0.5), _figure(x + len(text) * _CELL)
            yield f'<path class="l {run.style}" stroke-width="{_LINES[text[0]]}" d="M{_figure(x)} {middle}H{end}"/>'
        else:
            length = f' textLength="{_figure(len(text) * _CELL)}"' if len(text) > 1 else ""
            yield f'<text{kind} x="{_figure(x)}" y="{top + 14}"{length}>{escape(text)}</text>'


def _figure(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
