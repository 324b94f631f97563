"""Cuts texts of failures, which may have any size, so that they can be shown and sent; notes where the rest is. Pure.

Laws:
- a text that is cut keeps its beginning and its end, and so does each line: a traceback keeps its heading, its
  outermost and innermost frames, and its exception;
- the last line gets nothing but the mark of a cut, so that the same failure always ends in the same line.
"""

from __future__ import annotations

TRUNCATION_MARK = "[...]"
CUT_NOTE = "[the next line is cut"
"""The beginning of the note that says where the whole line is."""
OF_STDOUT = "standard output:"
"""The beginning of a traceback that comes from the end of standard output."""
MAX_LINE = 400
"""Characters of a line to show."""
_LINE_END = 100
_MAX_PATH = 1024


def exit_text(exitcode: int) -> str:
    """The message if only the exit code is known."""
    return f"it exited with code {exitcode}"


def truncate(text: str, limit: int, source: str = "") -> str:
    """A text of at most `limit` bytes of UTF-8, with lines of at most `MAX_LINE` characters.

    Args:
        text: the text; characters that UTF-8 cannot encode (half a surrogate pair in a worker's JSON) become `?`.
        limit: in bytes.
        source: where the full text is; empty for no note.
    """
    known = f"; all of it is in {truncate_end(source, _MAX_PATH)}" if source else ""
    lines: list[str] = []
    noted = not known
    for line in text.encode("utf-8", errors="replace").decode().split("\n"):
        if len(line) > MAX_LINE and not noted:
            noted = True
            lines.append(f"{CUT_NOTE}{known}]")
        lines.append(truncate_line(line))
    whole = "\n".join(lines)
    excess = len(whole.encode()) - limit
    return whole if excess <= 0 else truncate_end("\n".join(_without_middle(lines, excess, limit, known)), limit)


def truncate_line(line: str, width: int = MAX_LINE) -> str:
    """A line of at most `width` characters, without its middle if it has more."""
    if len(line) <= width:
        return line
    end = min(_LINE_END, width // 4)
    return line[: width - end - len(TRUNCATION_MARK)] + TRUNCATION_MARK + line[-end:]


def truncate_end(text: str, limit: int) -> str:
    """As much of a text as fits into `limit` bytes of UTF-8."""
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")


def first_line(text: str) -> str:
    """The first line of a text that is not blank, truncated."""
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    return truncate_line(first)


def _without_middle(lines: list[str], excess: int, limit: int, known: str) -> list[str]:
    """The first lines and, twice as much, the last ones, with a note between them on how much is missing."""
    mark = f"{TRUNCATION_MARK} at least {max(1, excess // 1024)} kB are cut here{known}"
    space = limit - len(mark.encode()) - 2
    head = _lines_that_fit(lines, space // 3)
    space -= sum(len(line.encode()) + 1 for line in head)
    tail = _lines_that_fit(lines[: len(head) - 1 : -1] if head else lines[::-1], space)
    return [*head, mark, *reversed(tail)]


def _lines_that_fit(lines: list[str], space: int) -> list[str]:
    fitting: list[str] = []
    for line in lines:
        space -= len(line.encode()) + 1
        if space < 0:
            break
        fitting.append(line)
    return fitting
