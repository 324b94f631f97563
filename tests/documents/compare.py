"""Whether a command's output is what a page shows: pure, over lines.

1. A line `...` stands for any number of lines; `...` within a line for any text.
2. Values that change with each run are masked on both sides: times, fractions, numbers of three digits and more,
   numbers with a unit, pids, random names, places in Rallypoint's source. Other numbers, such as ranks and counts, are
   compared.
3. Lines come in the shown order, unless the block says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ANY = "..."

_MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\d[T_ ]"), "#"),
    (re.compile(r"\b\d{1,2}:\d\d(:\d\d)?([.,]\d+)?\b"), "#"),
    (re.compile(r"\b(\d+ )?rallypoint/[\w/]+\.py:\d+"), "# rallypoint/#"),
    (re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"\d+\.\d+(e[-+]?\d+)?"), "#"),
    (re.compile(r"\d{3,}"), "#"),
    (re.compile(r"(\b\d+|#) ?(?=(s|ms|min|h|seconds?|minutes?|[KMGT]i?B|%)(\b|\s|$))"), "# "),
    (re.compile(r"(?i)(\bpids?\b[:= ]*\[?)\d+"), r"\1#"),
    (re.compile(r"^(\[\d+\]) \d+$"), r"\1 #"),
    (re.compile(r"[ \t]+"), " "),
)


def masked(line: str, varies: str = "") -> str:
    """A line without what another run would write differently.

    Args:
        varies: a regular expression for what else is to be masked.
    """
    if varies:
        line = re.sub(varies, "#", line)
    for pattern, stand_in in _MASKS:
        line = pattern.sub(stand_in, line)
    return line.rstrip()


def ends(shown: Sequence[str], came: Sequence[str], varies: str = "", *, any_order: bool = False) -> set[int]:
    """After how many of the lines that came all that is shown can have come; empty if it has not.

    The whole of `came` is as shown if its length is among them.
    """
    patterns = [_pattern(line, varies) for line in shown]
    lines = [masked(line, varies) for line in came]
    if any_order:
        return _ends_in_any_order(patterns, lines)
    reached = {0}
    for pattern in patterns:
        if pattern is None:
            reached = set(range(min(reached), len(lines) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(lines) and pattern.fullmatch(lines[at])}
    return reached


def _ends_in_any_order(patterns: Sequence[re.Pattern[str] | None], lines: Sequence[str]) -> set[int]:
    wanted = [pattern for pattern in patterns if pattern is not None]
    others = len(wanted) < len(patterns)
    for number, line in enumerate(["", *lines]):
        match = next((pattern for pattern in wanted if number and pattern.fullmatch(line)), None)
        if match is not None:
            wanted.remove(match)
        elif number and not others:
            return set()
        if not wanted:
            return set(range(number, len(lines) + 1)) if others else {number}
    return set()


def _pattern(line: str, varies: str) -> re.Pattern[str] | None:
    """What a line of the output has to be like; None for any lines."""
    if line.strip() == ANY:
        return None
    return re.compile(".*".join(map(re.escape, re.split(r" ?\.\.\. ?", masked(line, varies)))))


def without_blank_ends(lines: Sequence[str]) -> list[str]:
    """Lines without empty ones at the beginning and at the end."""
    kept = [number for number, line in enumerate(lines) if line.strip()]
    return list(lines[kept[0] : kept[-1] + 1]) if kept else []
