"""Texts of failures: why a worker died, found in the end of its standard error; and texts of any size, cut so that they
can be shown and sent, with a note on where the full text is. Pure.

Laws:
- a traceback is what Python prints for an exception that ended the program: from the first `Traceback` of its chain to
  the exception's own text. One that Python itself calls ignored, or that ended a thread only, counts if there is no
  other;
- text that a carriage return has overwritten, and colours, are left out;
- if the interpreter left the stacks of many threads, that of the thread which died comes first;
- of a text that is cut the beginning and the end stay, and so do those of each line: a traceback keeps its heading, its
  outermost and innermost frames, and its exception;
- the last line gets nothing but the mark of a cut, so that the same failure ends in the same line each time.
"""

from __future__ import annotations

import re

TRUNCATION_MARK = "[...]"
OF_STDOUT = "standard output:"
"""How a traceback begins that is the end of standard output."""
MAX_LINE = 400
"""Characters that are shown of a line."""
_LINE_END = 100
_MAX_PATH = 1024


def exit_text(exitcode: int) -> str:
    """The message if only the exit code is known."""
    return f"it exited with code {exitcode}"


def truncate(text: str, limit: int, source: str = "") -> str:
    """A text of at most `limit` bytes of UTF-8, with lines of at most `MAX_LINE` characters.

    Args:
        text: what UTF-8 cannot encode (half a surrogate pair from a worker's JSON) becomes a question mark.
        limit: in bytes.
        source: where the full text can be read; empty for no note.
    """
    known = f"; all of it is in {truncate_end(source, _MAX_PATH)}" if source else ""
    lines: list[str] = []
    noted = not known
    for line in text.encode("utf-8", errors="replace").decode().split("\n"):
        if len(line) > MAX_LINE and not noted:
            noted = True
            lines.append(f"[the next line is cut{known}]")
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
    """As much of a text as `limit` bytes of UTF-8 hold."""
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")


def first_line(text: str) -> str:
    """The first line of a text that is not blank, truncated."""
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    return truncate_line(first)


def _without_middle(lines: list[str], excess: int, limit: int, known: str) -> list[str]:
    """The first lines and, twice as much, the last ones, with a note between them on what is missing."""
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


# The end of standard error

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # window titles, links
    r"|\x1b[@-Z\\-_]"
)
_HEADER = re.compile(
    r"(?P<mark>\[[^\]]{1,40}\]:? ?)?(?:  [+|] )?(?:Exception Group )?Traceback \(most recent call last\):$"
)
_HEADING = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File ".*", line \d+, in ')
_OF_A_FRAME = 4
"""Lines of a frame at most, except repeated ones."""
_CHAIN = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_WEAKER_HEADERS = ("Exception ignored in", "Exception in thread", "--- Logging error ---")

_FATAL = "Fatal Python error: "
_STACK = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")

LINES = 30
"""Lines of standard error that are shown if there is no traceback."""
_HEADING_LINES = 10
"""Lines above a fatal error that are shown with it: a C library gives its reason there."""
_MAX_LINES = 50
"""Lines of a fatal error and its stacks that are shown."""
_MAX_WIDTH = 200
"""Characters of each of these lines that are shown, so that a `Cause` has room for all."""


def clean_lines(last_bytes: bytes) -> list[str]:
    """Lines as a person would have seen them: decoded, without colours, overwritten text and blank ends."""
    text = _ANSI.sub("", last_bytes.decode("utf-8", errors="replace"))
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def last_lines(lines: list[str], path: str = "") -> str:
    """The last `LINES` lines; before them, if there were more, the path of the file that has all."""
    more = [f"{TRUNCATION_MARK} all of it is in {path}"] if path and len(lines) > LINES else []
    return "\n".join([*more, *lines[-LINES:]])


def last_stacks(lines: list[str]) -> str:
    """The stacks that the interpreter printed when a signal ended it, that of the thread that died first.

    Empty if it printed nothing, or if that is among the last `LINES` lines anyway.
    """
    fatal = next((number for number in range(len(lines) - 1, -1, -1) if lines[number].startswith(_FATAL)), None)
    if fatal is None or len(lines) - fatal <= LINES:
        return ""
    starts = [number for number in range(fatal, len(lines)) if _STACK.match(lines[number])]
    current = next((number for number in starts if lines[number].startswith("Current")), None)
    if current is None:
        shown = lines[fatal:]
    else:
        behind = next((number for number in starts if number > current), len(lines))
        stack = [*lines[current:behind], *([""] if lines[behind - 1] else [])]
        shown = [lines[fatal], "", *stack, *lines[fatal + 2 : current], *lines[behind:]]
    above = lines[max(0, fatal - _HEADING_LINES) : fatal]
    cut = [*shown[:_MAX_LINES], TRUNCATION_MARK] if len(shown) > _MAX_LINES else shown
    return "\n".join(
        line if len(line) <= _MAX_WIDTH else line[:_MAX_WIDTH] + TRUNCATION_MARK for line in [*above, *cut]
    ).rstrip()


def last_traceback(lines: list[str]) -> str:
    """The last Python traceback in cleaned lines, with the exceptions that it came from; empty if there is none.

    If it is longer than what was kept, its heading is missing, and is added.
    """
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return _traceback_without_header(lines)
    lesser = ""
    for header in reversed(headers):
        first, traceback = _whole_chain(lines, header)
        if first == 0 or not lines[first - 1].startswith(_WEAKER_HEADERS):
            return traceback
        lesser = lesser or traceback
    return lesser


def is_last_traceback(lines: list[str]) -> bool:
    """Whether cleaned lines end with a whole traceback, as of an exception that nothing has caught. Only one whose text
    is a single line: what follows one could belong to its text, or be a sign that its program goes on.
    """
    traceback = last_traceback(lines)
    return bool(traceback) and not lines[-1].startswith(" ") and lines[-1].endswith(exception_line(traceback))


def _traceback_without_header(lines: list[str]) -> str:
    first = next((number for number, line in enumerate(lines[:_OF_A_FRAME]) if _FRAME.match(line)), None)
    if first is None:
        return ""
    last = _end(lines, first - 1, "")
    if lines[last - 1].startswith(" "):  # no exception follows
        return ""
    return "\n".join([_HEADING, f"  {TRUNCATION_MARK}", *lines[first:last]])


def is_traceback(text: str) -> bool:
    return _HEADER.match(text.partition("\n")[0]) is not None


def exception_line(traceback: str) -> str:
    """The line of a traceback that names its (last) exception: the first after the frames.

    If the worker was itself a launcher, whose exception has no text in that line, a summary of its report.
    """
    lines = traceback.split("\n")
    header = max(number for number, line in enumerate(lines) if _HEADER.match(line))
    gutter = "  | " if lines[header].startswith("  +") else ""
    after = (line.removeprefix(gutter) for line in lines[header + 1 :])
    exception = next((line for line in after if line and not line.startswith(" ")), lines[-1])
    return _from_launcher_report(lines) or exception if exception.endswith("ChildFailedError:") else exception


def _from_launcher_report(lines: list[str]) -> str:
    """A summary of a launcher's report: what failed, with rank and exit code; empty if this is not one."""
    title = next((line for line in lines if line.endswith(" FAILED")), "")
    values: dict[str, str] = {}
    for line in lines:  # the root cause comes last
        name, colon, value = line.partition(" : ")
        if colon:
            values[name.strip()] = value.strip()
    if not title or not {"rank", "exitcode"} <= values.keys():
        return ""
    return f"{title}: rank {values['rank']}, exitcode {values['exitcode']}"


def _whole_chain(lines: list[str], header: int) -> tuple[int, str]:
    """Where the chain that ends in the traceback at `header` begins, and its text."""
    matched = _HEADER.match(lines[header])
    mark = (matched and matched["mark"]) or ""
    first = header
    while (earlier := _chained_header(lines, first, mark)) is not None:
        first = earlier
    last = _end(lines, header, mark)
    return first, "\n".join(_without_chain_mark(line, mark) for line in lines[first:last])


def _chained_header(lines: list[str], header: int, mark: str) -> int | None:
    """The header of the traceback that the one at `header` came from, or None."""
    above = header - 1
    while above > 0 and not _without_chain_mark(lines[above], mark):
        above -= 1
    if above <= 0 or _without_chain_mark(lines[above], mark) not in _CHAIN:
        return None
    for number in range(above - 1, -1, -1):
        if _HEADER.match(lines[number]):
            return number
    return None


def _without_chain_mark(line: str, mark: str) -> str:
    return "" if line == mark.rstrip() else line.removeprefix(mark)


def _end(lines: list[str], header: int, mark: str) -> int:
    """The line after the exception's text, which ends at a blank line; in a marked traceback, where the mark ends."""
    number = header + 1
    while number < len(lines) and _is_part(lines[number], mark, framed=True):
        number += 1
    while number < len(lines) and _is_part(lines[number], mark, framed=False):
        number += 1
        behind_blank = number + 1
        if mark and behind_blank < len(lines) and not lines[number] and lines[behind_blank].startswith(mark):
            number = behind_blank
    return number


def _is_part(line: str, mark: str, framed: bool) -> bool:
    if mark and not line.startswith(mark):
        return False
    text = line.removeprefix(mark)
    return text.startswith(" ") if framed else bool(text.strip()) and not text.startswith(_WEAKER_HEADERS)
