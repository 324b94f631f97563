"""Judges what a launcher says about a failure. Pure.

1. The answer is the launcher's own text: first the root cause of its report, then the rest of the report, then its
   error sentence and its log lines. Output of workers around it does not count, even if a patient person could find the
   cause there.
2. Right: it names the true rank, and the words of the true cause before those of any other.
3. Wrong: it names another rank or another cause, such as a mere consequence.
4. Silent: neither; also a report that names the right rank and no cause at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

from tests.causes.case import Case


class Score(StrEnum):
    RIGHT = "right"
    SILENT = "silent"
    WRONG = "wrong"


_ROOT = "Root Cause (first observed failure):"
_TITLE = re.compile(r"^.* FAILED$", re.MULTILINE)
_IN_SHORT = re.compile(r"^.* FAILED: .*$", re.MULTILINE)
_RANKS = (re.compile(r"^  rank +: (-?\d+) ", re.MULTILINE), re.compile(r" FAILED: rank (\d+) "))
_CONSEQUENCE = re.compile(
    r"Timed out waiting|[Cc]onnection (?:was likely )?(?:closed|reset)|wait timeout after|watchdog caught|BdbQuit"
)
"""Words that end nothing by themselves: whoever is told only them is sent the wrong way."""
_OWN_ERROR = re.compile(r"^(?:rallyrun|torchrun): error: .*$|^torch\.distributed\.[\w.]+: .*$", re.MULTILINE)


def answer(console: str, launcher: int) -> str:
    """What the launcher (a pid) says on a console, the first to be read first; empty if it says nothing."""
    return "\n".join(filter(None, [_report(console), *_IN_SHORT.findall(console), *_logged(console, launcher)]))


def _logged(console: str, launcher: int) -> Iterator[str]:
    """The error sentence and the log lines, with those below them that belong to them."""
    yield from _OWN_ERROR.findall(console)
    of_torch = rf"[IWEC]\d{{4}} [\d:.]+ {launcher} [^\]]*\] "
    of_ft_launcher = rf"\[[^\]]*\] \[[A-Z]+\] \[ft_launcher{launcher}@[^\]]*\] "
    head = re.compile(f"^(?:{of_torch}|{of_ft_launcher})")
    ours = False
    for line in console.split("\n"):
        begun = head.match(line)
        ours = begun is not None or (ours and line.startswith("  "))
        if ours:
            yield line[begun.end() :] if begun else line


def _report(console: str) -> str:
    begin = console.rfind(_ROOT)
    if begin < 0:
        return ""
    root, bar, _ = console[begin:].partition("\n=====")
    titles = [match.start() for match in _TITLE.finditer(console, 0, begin)]
    return root + bar + console[titles[-1] : begin] if titles else root


def named_rank(text: str) -> int | None:
    """The rank that an answer names as that of the first failure; None if it names none."""
    found = [match for pattern in _RANKS if (match := pattern.search(text))]
    return int(min(found, key=re.Match.start)[1]) if found else None


def score(case: Case, text: str) -> Score:
    """Judge one answer."""
    rank = named_rank(text)
    if rank is not None and case.rank is not None and rank != case.rank:
        return Score.WRONG
    others = [match.start() for each in case.never if (match := re.search(each, text))]
    first = text[: min(others)] if others else text
    if text and all(re.search(each, first) for each in case.says):
        return Score.RIGHT
    return Score.WRONG if others or _CONSEQUENCE.search(text) else Score.SILENT


def of_nodes(scores: list[Score]) -> Score:
    """The score of a job with several nodes: one that misleads spoils it, and it is enough that one tells."""
    return next((each for each in (Score.WRONG, Score.RIGHT) if each in scores), Score.SILENT)


def in_short(text: str) -> str:
    """One line of an answer, for a table."""
    lines = [line.strip() for line in text.partition("\n=====")[0].split("\n")]
    begun = next((number for number, line in enumerate(lines) if line.startswith("traceback :")), None)
    if begun is None:
        return lines[0]
    told = [line for line in lines[begun:] if line and set(line) - set("=-")]
    last = next((line for line in told if re.match(r"[\w.]+(Error|Exception|Quit|Interrupt|Exit|Group)\b", line)), "")
    return f"rank {named_rank(text)}: {last or told[0].removeprefix('traceback : ')}"
