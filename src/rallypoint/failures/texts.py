"""Cuts texts about failures, which can have any size, so that they can be shown and sent. Says where the rest is. Pure.

Laws:
- a cut text keeps its start and its end, and so does each line: a traceback keeps its heading, its outermost and
innermost frames, and its exception;
- only the mark of a cut is added to the last line, so that the same failure always ends in the same line.
"""

from __future__ import annotations

TRUNCATION_MARK = "[...]"
CUT_NOTE = "[the next line is cut"
"""Start of the note that says where to find the whole line."""
OF_STDOUT = "standard output:"
"""Start of a traceback that comes from the end of standard output."""
MAX_LINE = 400
"""Maximum characters per line to show."""
_LINE_END = 100
_MAX_PATH = 1024


def exit_text(exitcode: int) -> str:
    """Message if only the exit code is known."""
    return f"it exited with code {exitcode}"


def truncate(text: str, limit: int, source: str = "") -> str:
    """Cut a text to at most `limit` bytes of UTF-8, with lines of at most `MAX_LINE` characters.

    Args:
        text: the text; characters that UTF-8 cannot encode (half a surrogate pair in a worker's JSON) become `?`.
        limit: in bytes.
        source: where to find the full text; empty for no note.
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
    """Cut the middle out of a line that is longer than `width` characters."""
    if len(line) <= width:
        return line
    end = min(_LINE_END, width // 4)
    return line[: width - end - len(TRUNCATION_MARK)] + TRUNCATION_MARK + line[-end:]


def truncate_end(text: str, limit: int) -> str:
    """As much of a text as fits into `limit` bytes of UTF-8."""
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")


def first_line(text: str) -> str:
    """The first nonblank line of a text, truncated."""
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    return truncate_line(first)


def _without_middle(lines: list[str], excess: int, limit: int, known: str) -> list[str]:
    """Keep the first lines and twice as many last ones, with a note between them on how much is missing."""
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
