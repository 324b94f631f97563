"""Finds in the end of a worker's output why it died. Pure.

Laws:
- a traceback shows an exception as Python, rich or loguru print it: from the first `Traceback` of its chain to the end
of the exception's own text. An exception that Python itself calls ignored, or that ended only a thread, counts only if
there is no other;
- an exception's text continues after a blank line, until a line that clearly belongs to something else, such as a log;
- colours, text that a carriage return overwrote, and anything that a logger or a launcher puts before each line of a
traceback are dropped; a traceback after an unfinished line starts a new line;
- if the interpreter printed the stacks of many threads, the stack of the thread that died comes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rallypoint.base.light_typing import NamedTuple
from rallypoint.failures.texts import CUT_NOTE, TRUNCATION_MARK, first_line

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # window titles, links
    r"|\x1b[@-Z\\-_]"
)
_HEADER = re.compile(
    r"(?P<mark>\[[^\]]{1,40}\]:? ?)?(?:  [+|] )?(?:Exception Group )?Traceback \(most recent call last\):$"
    r"|(?P<box>[╭+]?[─-]+ Traceback \(most recent call last\) [─-]+[╮+]?)$"
)
_HEADING = "Traceback (most recent call last):"
_BEHIND_ANYTHING = re.compile(
    r"(?:\[rank\d+\]: )?(?:  [+|] )?(?:Exception Group )?Traceback \(most recent call last\):$"
)
_FRAME_BELOW = re.compile(r'(?:\[rank\d+\]: )?  (?:\| +)?(?:  )?File "')
_OF_A_LIBRARY = re.compile(r"\s*[A-Z][a-z]+ $")
"""A library's words before a traceback that it quotes, as in `Original Traceback (most recent call last):`."""
_FRAME = re.compile(r'  File ".*", line \d+, in ')
_OUTERMOST = re.compile(r'[> |]* File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_OUTERMOST_IN_A_BOX = re.compile(r"[│|] (?P<file>\S.*?):(?P<line>\d+) in (?P<function>\S+)")
_OF_A_FRAME = 4
"""Maximum lines per frame, without repeated ones."""
_OF_A_PROGRAM = ("<module>", "_run_module_as_main")
"""Outermost frame of an uncaught exception: in a script, and in a module run with `-m`."""
_CHAIN = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_IGNORED = (
    *("Exception ignored ", "--- Logging error ---", "Error in atexit.", "Error in sys.excepthook:"),
    "future: <",  # asyncio: a task whose exception was never retrieved
)
_LESSER = (*_IGNORED, "Exception in thread ")
_MOST_BEHIND_BLANK = 200
"""Maximum lines of an exception's text after a blank line."""

_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|SUCCESS|WARN|WARNING|ERROR|CRITICAL|FATAL)"
_OTHER = re.compile(
    r"(?:\[rank ?\d+\]:)?\[?[DIWEFC](?:\d{4} \d\d:| ?\S+\.\w+:\d+\])"  # glog, torch
    r"|\[(?:rank|default|worker|node) ?\d+\]"
    r"|[\[(]?(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d[-/]\d\d[-/]\d{2,4})[ T_,]+\d\d:\d\d"
    r"|[\[(]?\d\d:\d\d:\d\d\b"
    rf"|{_LEVEL}:[\w.]*:|\[{_LEVEL}\]|{_LEVEL} +(?:[-|[]|\d\d)"
    r"|(?:level|time|ts)=\S+ "
    r'|\{.*"(?:level|levelname|severity|timestamp|time|ts)": ?'
    r"|\S.*:\d+: \w*Warning: |ResourceWarning: Enable tracemalloc"
    r"|\S+:\d+:\d+ \[\d+\] NCCL |wandb: "
    r"|(?:Task|Future) exception was never retrieved|Process [\w-]+:$"
    r"|terminate called |Fatal Python error: |\*\*\* (?:SIG|Error)"
    rf"|{'|'.join(map(re.escape, _CHAIN))}"
    r"|.*\d+%\|.*\| [\d.]+\w?/"  # a progress bar
)
"""Start of a line that is not part of an exception's text."""
_TELLS_ERROR = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL)\b|\[(?:error|critical|fatal) *\]"
    r"|\"(?:error|critical|fatal)\"|^\[?[EFC]\d{4} |level=error"
)
_LOG_HEAD = 300
"""Maximum characters of a line to match: a pattern takes quadratic time."""

_FATAL = "Fatal Python error: "
_THROWN = ("terminate called ", "libc++abi: terminating ", "thread '")
_OF_THROWN = 4
"""Lines in which a library says what it threw; below them there may be a hundred frames."""
_STACK = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")

LINES = 30
"""Lines of standard error to show without a traceback."""
_HEADING_LINES = 10
"""Lines above a fatal error to show with it, where a C library says why."""
_MAX_LINES = 50
"""Maximum lines of a fatal error and its stacks to show."""
_MAX_WIDTH = 200
"""Maximum characters per such line, so that a `Cause` has room for all."""


def clean_lines(last_bytes: bytes) -> list[str]:
    """Clean lines to what a person would have seen: decoded, without colours, overwritten text and blank ends."""
    text = _ANSI.sub("", last_bytes.decode("utf-8", errors="replace"))
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return _with_plain_headers(lines)


def _with_plain_headers(lines: list[str]) -> list[str]:
    plain: list[str] = []
    prefix = ""
    for line, below in pairwise([*lines, ""]):
        if line.endswith(_HEADING) and not _HEADER.match(line):
            header = _BEHIND_ANYTHING.search(line)
            before = line[: header.start()] if header is not None else ""
            if before.endswith("  "):  # one exception of a group
                before = ""
            prefix = before if below.startswith(f"{before}  ") else ""
            if before and not prefix and _FRAME_BELOW.match(below) and not _OF_A_LIBRARY.match(before):
                plain += [before.rstrip(), line[len(before) :]]
                continue
        elif prefix and not line.startswith(prefix.rstrip()):
            prefix = ""
        plain.append(line.removeprefix(prefix).removeprefix(prefix.rstrip()) if prefix else line)
    return plain


def unfold_json(lines: Sequence[str]) -> list[str]:
    """Split a traceback inside a JSON line (as in a log) into lines."""
    unfolded: list[str] = []
    for line in lines:
        unfolded += (_in_json(line) if "Traceback (most recent call last):\\n" in line else None) or [line]
    return unfolded


def _in_json(line: str) -> list[str] | None:
    import json

    try:
        entry = json.loads(line[line.find("{") :])
    except (ValueError, RecursionError):
        return None
    texts = [text for text in entry.values() if isinstance(text, str)] if isinstance(entry, dict) else []
    first = next((text for text in texts if _HEADING in text.split("\n")), None)
    return None if first is None else clean_lines(first.encode("utf-8", errors="replace"))


def last_lines(lines: list[str], path: str = "") -> str:
    """The last `LINES` lines. If there were more, the path of the complete file precedes them."""
    more = [f"{TRUNCATION_MARK} all of it is in {path}"] if path and len(lines) > LINES else []
    return "\n".join([*more, *lines[-LINES:]])


def last_stacks(lines: list[str]) -> str:
    """Find the stacks that the interpreter printed when a signal ended it; the thread that died comes first.

    Empty if it printed none, or if they are among the last `LINES` lines anyway.
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


def last_thrown(lines: list[str]) -> str:
    """The last lines in which a library said why it ends the process; empty if it said nothing."""
    found = next((number for number in range(len(lines) - 1, -1, -1) if lines[number].startswith(_THROWN)), None)
    if found is None:
        return ""
    frames = (number for number, line in enumerate(lines[found:], found) if line.startswith(("frame #", _FATAL)))
    return "\n".join(lines[found : min(next(frames, len(lines)), found + _OF_THROWN)]).rstrip()


# Tracebacks


class Traceback(NamedTuple):
    """A traceback among lines, with the exceptions that led to its exception.

    `begin` is its first line, `behind` the line after those that certainly belong to it: the frames, and the first line
    of the exception's text with the indented lines below it. `file`, `line` and `function` describe its outermost
    frame, where the exception was caught if it was; empty and 0 if unknown. `is_ignored`: Python printed it and
    continued; `is_lesser`: it was ignored or ended only a thread.
    """

    text: str
    begin: int
    behind: int
    file: str
    line: int
    function: str
    is_lesser: bool = False
    is_ignored: bool = False

    @property
    def is_of_program(self) -> bool:
        """Whether it begins where a program begins."""
        return self.function in _OF_A_PROGRAM


def tracebacks(lines: list[str]) -> Iterator[Traceback]:
    """Yield the tracebacks in cleaned lines, the last one first. If one is longer than the stored output, add its
    missing heading."""
    above = len(lines)
    found = False
    for header in range(len(lines) - 1, -1, -1):
        if header < above and (matched := _HEADER.match(lines[header])):
            found = True
            traceback = _at(lines, header, matched["mark"] or "")
            above = traceback.begin
            yield traceback
    if not found and (text := _without_header(lines)):
        yield Traceback(text, 0, len(lines), "", 0, "")


def last_traceback(lines: list[str]) -> str:
    """The last Python traceback in cleaned lines, with the exceptions that led to it; empty if there is none."""
    lesser = ""
    for traceback in tracebacks(lines):
        if not traceback.is_lesser:
            return traceback.text
        lesser = lesser or traceback.text
    return lesser


def is_last_traceback(lines: list[str]) -> bool:
    """Whether cleaned lines end with a whole traceback, as of an uncaught exception. Its text must be a single line:
    more lines could belong to the text, or be a sign that the program continues."""
    traceback = last_traceback(lines)
    return bool(traceback) and not lines[-1].startswith(" ") and lines[-1].endswith(exception_line(traceback))


def last_words(lines: list[str], found: Sequence[Traceback], begin: int) -> str:
    """The last words in lines from `begin` on, except in tracebacks and in log lines below the error level."""
    of_tracebacks = {
        number for traceback in found for number in range(traceback.begin - traceback.is_lesser, traceback.behind)
    }
    for number in range(len(lines) - 1, begin - 1, -1):
        line = lines[number]
        if line and not line.startswith((" ", "\t")) and number not in of_tracebacks and not _is_noise(line):
            last = number + 1
            while last < len(lines) and lines[last].startswith((" ", "\t")):
                last += 1
            return "\n".join(lines[number:last])
    return ""


def _is_noise(line: str) -> bool:
    if line == TRUNCATION_MARK or line.startswith(_LESSER):
        return True
    return _is_other(line) and not _TELLS_ERROR.search(line[:_LOG_HEAD])


def _is_other(line: str) -> bool:
    return _OTHER.match(line[:_LOG_HEAD]) is not None


def is_traceback(text: str) -> bool:
    return _HEADER.match(text.partition("\n")[0]) is not None


def is_said_after(message: str, text: str) -> bool:
    """Whether a message comes from a worker's words after a survived traceback, in a text that contains both."""
    said, lines = first_line(message), text.split("\n")
    return any(map(_HEADER.match, lines)) and said in lines and said != exception_line(text)


def exception_line(traceback: str) -> str:
    """The line of a traceback that names its (last) exception: the first line after the frames.

    If the worker was itself a launcher, whose exception has no text in that line, return a summary of its report.
    """
    lines = traceback.split("\n")
    header = max(number for number, line in enumerate(lines) if _HEADER.match(line))
    gutter = "  | " if lines[header].startswith("  +") else ""
    frames = (" ", "> File ", CUT_NOTE, TRUNCATION_MARK, *("│╰|+" if _is_box(lines[header]) else ""))
    after = (line.removeprefix(gutter) for line in lines[header + 1 :])
    exception = next((line for line in after if line and not line.startswith(frames)), lines[-1])
    return _from_launcher_report(lines) or exception if exception.endswith("ChildFailedError:") else exception


def _from_launcher_report(lines: list[str]) -> str:
    """Summarize a launcher's report: what failed, with rank and exit code; empty for any other text."""
    title = next((line for line in lines if line.endswith(" FAILED")), "")
    values: dict[str, str] = {}
    for line in lines:  # the root cause comes last
        name, colon, value = line.partition(" : ")
        if colon:
            values[name.strip()] = value.strip()
    if not title or not {"rank", "exitcode"} <= values.keys():
        return ""
    return f"{title}: rank {values['rank']}, exitcode {values['exitcode']}"


def _at(lines: list[str], header: int, mark: str) -> Traceback:
    """The traceback at `header`, with the chain that ends in it."""
    first = header
    while (earlier := _chained_header(lines, first, mark)) is not None:
        first = earlier
    heading = lines[first - 1] if first else ""
    is_cut = TRUNCATION_MARK in lines[max(0, first - 2) : first]  # the heading might be missing
    frames = _behind_frames(lines, header, mark)
    is_group = lines[header].removeprefix(mark).startswith("  +")  # a group ends with its frame
    behind = frames + (not is_group)
    while behind < len(lines) and lines[behind].removeprefix(mark).startswith((" ", "\t")):
        behind += 1
    end = frames if is_group else _behind_marked(lines, frames, mark) if mark else _behind_text(lines, frames)
    text = "\n".join(_without_chain_mark(line, mark) for line in lines[first:end])
    outermost = _OUTERMOST_IN_A_BOX if _is_box(lines[header]) else _OUTERMOST
    top = next(
        filter(None, (outermost.match(line.removeprefix(mark)) for line in lines[header + 1 : header + 4])), None
    )
    return Traceback(
        *(text, first, min(behind, len(lines))),
        file=top["file"] if top else "",
        line=int(top["line"]) if top else 0,
        function=top["function"] if top else "",
        is_lesser=is_cut or heading.startswith(_LESSER),
        is_ignored=heading.startswith(_IGNORED),
    )


def _without_header(lines: list[str]) -> str:
    first = next((number for number, line in enumerate(lines[:_OF_A_FRAME]) if _FRAME.match(line)), None)
    if first is None:
        return ""
    frames = _behind_frames(lines, first - 1, "")
    if frames == len(lines) or not lines[frames]:  # no exception follows
        return ""
    return "\n".join([_HEADING, f"  {TRUNCATION_MARK}", *lines[first : _behind_text(lines, frames)]])


def _chained_header(lines: list[str], header: int, mark: str) -> int | None:
    """The header of the traceback that led to the one at `header`, or whose exception's text quotes it; or None."""
    above = header - 1
    while above > 0 and not _without_chain_mark(lines[above], mark):
        above -= 1
    if above <= 0:
        return None
    leads = _without_chain_mark(lines[above], mark)
    is_quoted = not mark and leads.endswith(":") and not _is_other(leads) and not leads.startswith(_LESSER)
    if leads not in _CHAIN and not is_quoted:
        return None
    earlier = next((number for number in range(above - 1, -1, -1) if _HEADER.match(lines[number])), None)
    if earlier is not None and is_quoted and _behind_text(lines, _behind_frames(lines, earlier, "")) <= above:
        return None
    return earlier


def _without_chain_mark(line: str, mark: str) -> str:
    return "" if line == mark.rstrip() else line.removeprefix(mark)


def _is_box(header: str) -> bool:
    matched = _HEADER.match(header)
    return matched is not None and matched["box"] is not None


def _behind_frames(lines: list[str], header: int, mark: str) -> int:
    """The line after a traceback's frames, where the exception's text starts."""
    number = header + 1
    if header >= 0 and _is_box(lines[header]):
        while number < len(lines) and lines[number].startswith(("│", "|")):
            number += 1
        return number + 1 if number < len(lines) and lines[number].startswith(("╰", "+")) else number
    if number < len(lines) and not lines[number] and not mark:  # loguru puts blank lines between frames
        while number < len(lines) and (not lines[number] or lines[number].startswith((" ", "> File "))):
            number += 1
        return number
    while number < len(lines) and lines[number].startswith(mark) and lines[number][len(mark) :].startswith(" "):
        number += 1
    return number


def _behind_text(lines: list[str], begin: int) -> int:
    """The line after an exception's text, which starts at `begin`."""
    number, most, is_quoting = begin, len(lines), False
    while number < most:
        line = lines[number]
        if not line:
            is_quoting, most = False, min(most, number + _MOST_BEHIND_BLANK)
        elif _HEADER.match(line) or line == TRUNCATION_MARK or line.startswith(_LESSER):
            break
        elif number > begin and not is_quoting and _is_other(line):
            # `RuntimeError: the server has not started:`, and below it the end of the server's log
            is_quoting = lines[number - 1].endswith(":")
            if not is_quoting:
                break
        number += 1
    while number > begin and not lines[number - 1]:
        number -= 1
    return number


def _behind_marked(lines: list[str], begin: int, mark: str) -> int:
    """Like `_behind_text`, if each line of the traceback has a mark: the text ends with the mark."""
    number = begin
    while number < len(lines) and lines[number].startswith(mark):
        text = lines[number].removeprefix(mark)
        if not text.strip() or text.startswith(_LESSER):
            break
        number += 1
        behind_blank = number + 1
        is_blank = behind_blank < len(lines) and lines[number] in ("", mark.rstrip())
        if is_blank and lines[behind_blank].startswith(mark):
            number = behind_blank
    return number
