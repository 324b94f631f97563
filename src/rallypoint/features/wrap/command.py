"""The command of `--wrap` as a template, and the ranks of `--wrap-ranks`. Pure.

The command is split as in a shell, and only macros and sums are expanded:

    %r %l %h %n   global rank, local rank, host, round
    %c            as a separate word: the worker's command line
    %s            as a separate word: that without the interpreter, for a program that runs a Python script itself
    %%            a percent sign
    $((5678+%l))  a sum of whole numbers and of %r, %l and %n

Without %c and %s, the worker's command line is appended; after `python -m MODULE`, the script is.
"""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rallypoint.base.errors import UsageError

_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_TERMS = re.compile(r"(?:\d{1,9}|%[rln])(?:\+(?:\d{1,9}|%[rln]))*", re.ASCII)
_MACRO = re.compile(r"\$\(\(([^()]*)\)\)|%(.)?", re.DOTALL)
_UNEXPANDED = re.compile(r"\$\{?([A-Za-z_]\w*)|\$\([^()]+\)", re.ASCII)
_WORKER, _SCRIPT = "%c", "%s"
_IN_TEXT = "rlhn%"
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
_WITH_VALUE = ("-X", "-W")
"""Python options whose value is a separate word."""
_RANK = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


class Place(NamedTuple):
    """A worker's place in a round."""

    rank: int
    local_rank: int
    host: str
    round: int


class WrappedArgv(NamedTuple):
    """What to start for one worker: `argv`, and `program`, the part that the wrapper runs: all of `argv` if the wrapper
    is the interpreter of the worker's script."""

    argv: list[str]
    program: list[str]


class Template(NamedTuple):
    """A command that wraps workers. `in_python`: it runs the worker's script in its own interpreter."""

    words: tuple[str, ...]
    in_python: bool

    @property
    def name(self) -> str:
        """The program's name, for messages."""
        return os.path.basename(self.words[0])

    def argv(self, worker: Sequence[str], place: Place) -> WrappedArgv:
        """Build one worker's command line. Raises UsageError if the worker must be a Python script and is not."""
        own = script_of(worker) if self.in_python else [*worker]
        found: list[str] = []
        for word in self.words:
            found += own if word in (_WORKER, _SCRIPT) else [_expanded(word, place)]
        return WrappedArgv(found, found[self._interpreter() :] if self.in_python else own)

    def _interpreter(self) -> int:
        """Index of the interpreter that runs the script; 0 without one."""
        pythons = [at for at, word in enumerate(self.words) if os.path.basename(word).startswith("python")]
        return max(pythons, default=0)


def read_template(text: str, variables: Collection[str] = ()) -> Template:
    """Parse a command into a template.

    Args:
        text: the value of the flag.
        variables: names of environment variables, to which words cannot refer without a shell.

    Raises:
        UsageError: the text is not a command.
    """
    try:
        words = shlex.split(_SUM.sub(lambda found: f"$(({''.join(found[1].split())}))", text))
    except ValueError as error:
        raise UsageError(
            f"it cannot be split into words: {error}; close the quotation mark, or write \\ at the end"
        ) from None
    if not words or not words[0]:
        raise UsageError("it is not a command; use one such as 'nsys profile -o r%r'")
    for number, word in enumerate(words):
        _check_word(word)
        if _SHELLS.isdisjoint(map(os.path.basename, words[:number])):
            _check_expanded(word, variables)
    places = [word for word in words if word in (_WORKER, _SCRIPT)]
    if len(places) > 1:
        raise UsageError(f"it contains {' and '.join(places)}, but the worker runs only once; use one of them")
    if not places:
        places = [_SCRIPT if _runs_module(words) else _WORKER]
        words += places
    if words[0] in (_WORKER, _SCRIPT):
        raise UsageError("it contains no program that starts the worker; add one, such as 'nsys profile -o r%r'")
    return Template(tuple(words), places[0] == _SCRIPT)


def _check_word(word: str) -> None:
    if word in (_WORKER, _SCRIPT):
        return
    if "$((" in _SUM.sub("", word):
        raise UsageError(f"{word!r} contains $(( without a sum and a closing )), as in $((5678+%l))")
    for match in _MACRO.finditer(word):
        terms, letter = match.groups()
        if terms is not None:
            if _TERMS.fullmatch(terms) is None:
                raise UsageError(
                    f"{match[0]} is not a valid sum: only whole numbers, %r, %l and %n can be added, as in $((5678+%l))"
                )
        elif letter in ("c", "s"):
            raise UsageError(
                f"{word!r} contains %{letter}, which stands for several words; write it as a separate word"
            )
        elif letter is None or letter not in _IN_TEXT:
            raise UsageError(
                f"{match[0]} is not one of %r, %l, %h, %n, %c and %s; write %%{letter or ''} for a percent sign"
            )


def _check_expanded(word: str, variables: Collection[str]) -> None:
    for found in _UNEXPANDED.finditer(_SUM.sub("", word)):
        if found[1] is None or found[1] in variables:
            raise UsageError(
                f"{word!r} contains {found[0].replace('{', '')}, which no shell expands here; write the value, or put "
                "the whole command into a script"
            )


def _runs_module(words: Sequence[str]) -> bool:
    """Whether the command is `python [options] -m MODULE ...`."""
    if not os.path.basename(words[0]).startswith("python"):
        return False
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return True
        if not word.startswith("-"):
            return False
        if word in _WITH_VALUE:
            next(rest, None)
    return False


def script_of(worker: Sequence[str]) -> list[str]:
    """The script, or `-m` and the module, with its arguments, from a worker's command line. Raises UsageError if that
    is not `python [-u] SCRIPT`."""
    script = list(worker[1:])
    if script[:1] == ["-u"]:
        del script[0]
    is_script = bool(script) and (script[0] == "-m" or not script[0].startswith("-"))
    if not is_script or not os.path.basename(worker[0]).startswith("python"):
        raise UsageError(
            f"the wrapper runs a Python script itself, but the workers run {shlex.join(worker[:3])}; if it can run any "
            "program, put %c where the worker's command line belongs"
        )
    return script


def _expanded(word: str, place: Place) -> str:
    numbers = {"%r": place.rank, "%l": place.local_rank, "%n": place.round}
    texts = {macro: str(number) for macro, number in numbers.items()} | {"%h": place.host, "%%": "%"}

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return texts[match[0]]
        return str(sum(numbers[term] if term in numbers else int(term) for term in match[1].split("+")))

    return _MACRO.sub(value, word)


class Ranks(NamedTuple):
    """Some of a job's ranks; all if there are no ranges."""

    ranges: tuple[range, ...]

    def include(self, rank: int) -> bool:
        return not self.ranges or any(rank in some for some in self.ranges)

    @property
    def least(self) -> int:
        """Minimum number of ranks in a job that has one of these."""
        return min((some.start + 1 for some in self.ranges), default=0)


def read_ranks(text: str) -> Ranks:
    """Parse ranks and ranges of ranks, separated by commas. Raises UsageError if the text is not such a list."""
    ranges = []
    for part in text.split(",") if text else ():
        match = _RANK.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:
            where = f" in {text!r}" if part != text else ""
            raise UsageError(f"{part!r}{where} is neither a rank nor a range of ranks; a valid list is 0,3-5")
        ranges.append(range(first, last + 1))
    return Ranks(tuple(ranges))
