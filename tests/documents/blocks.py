"""What the pages of the documents have to run, as data: pure, from the text of a page to its steps.

1. A `console` block is a terminal. A line that begins with a prompt (`$ `, or `NAME$ ` for the terminal NAME) is a
   command, which goes on in the next line if it ends in a backslash; other lines are what it writes.
2. What a reader need not see stands in comments. One at the beginning of a line says something of the page (`PAGE`),
   is a step itself (`run`), or says something of the block that follows (`BLOCK`).
3. Shell commands stand in `console` blocks alone, so that none is overlooked: `problems` says where they do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

SHELLS = frozenset({"sh", "bash", "shell", "zsh", "shell-session"})
PAGE = frozenset({"setting", "stands for"})
BLOCK = frozenset({"file", "exit", "not run", "run in", "any order", "varies", "still running", "terminal"})

_FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>[^`]*)$")
_COMMENT = re.compile(r"<!--\s*(?P<key>[a-z ]+?)\s*(?::\s*(?P<value>.*?))?\s*-->\s*", re.DOTALL)
_PROMPT = re.compile(r"(?P<terminal>[a-z][a-z0-9-]*)?\$ (?P<text>.*)")
_HIDDEN = re.compile(r" {4,}(\$ |rallyrun |rallyctl )|(rallyrun|rallyctl) \S|\$ \S")


class PageError(Exception):
    """A page breaks a rule."""


@dataclass(frozen=True)
class Command:
    """One command, with what the page shows of its output."""

    line: int
    text: str
    output: tuple[str, ...]
    terminal: str = ""


@dataclass(frozen=True)
class Block:
    """A fenced block with the comments before it; `line` is that of its fence."""

    line: int
    language: str
    lines: tuple[str, ...]
    says: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What stands in it."""
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def is_run(self) -> bool:
        """Whether it is to be run on this page."""
        return self.language == "console" and not {"not run", "run in"} & self.says.keys()

    @property
    def shown(self) -> tuple[str, ...]:
        """Lines before its first command: what a command of an earlier block goes on to write."""
        return tuple(self.lines[: self._starts()[0]] if self._starts() else self.lines)

    @property
    def commands(self) -> tuple[Command, ...]:
        """Its commands, in their order."""
        bounds = [*self._starts(), len(self.lines)]
        return tuple(self._command(*each) for each in pairwise(bounds))

    @property
    def compares(self) -> bool:
        """Whether output is shown at all; if not, the block is a list of commands."""
        return any(command.output for command in self.commands)

    @property
    def codes(self) -> tuple[int, ...]:
        """The exit status of each command; without commands, of the one that goes on."""
        given = [int(code) for code in self.says.get("exit", "0").split(",")]
        return tuple([0] * (max(1, len(self.commands)) - len(given)) + given)

    def _starts(self) -> list[int]:
        continued = {number + 1 for number, line in enumerate(self.lines) if line.endswith("\\")}
        return [n for n, line in enumerate(self.lines) if n not in continued and _PROMPT.match(line)]

    def _command(self, start: int, end: int) -> Command:
        first = start
        while self.lines[first].endswith("\\") and first + 1 < end:
            first += 1
        match = _PROMPT.match(self.lines[start])
        assert match is not None
        text = "\n".join([match["text"], *self.lines[start + 1 : first + 1]])
        return Command(self.line + 1 + start, text, self.lines[first + 1 : end], match["terminal"] or "")


@dataclass(frozen=True)
class Hidden:
    """A command that readers do not see."""

    line: int
    text: str


@dataclass(frozen=True)
class Page:
    """All blocks and hidden commands of a page, in their order, and what it says of itself."""

    name: str
    steps: tuple[Block | Hidden, ...]
    settings: frozenset[str]
    stands_for: dict[str, str]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks alone."""
        return tuple(step for step in self.steps if isinstance(step, Block))

    @property
    def runs(self) -> bool:
        """Whether it has a command to run."""
        return any(block.is_run for block in self.blocks)

    @property
    def terminals(self) -> tuple[str, ...]:
        """Names of its terminals, in the order in which they appear."""
        named = [command.terminal for block in self.blocks if block.is_run for command in block.commands]
        return tuple(dict.fromkeys(named))


def page(name: str, text: str) -> Page:
    """The steps of a page.

    Raises:
        PageError: a comment says what nothing knows, or stands before no block.
    """
    steps: list[Block | Hidden] = []
    about: dict[str, str] = {}
    settings: list[str] = []
    stands_for: dict[str, str] = {}
    for line, part in _parts(text):
        if isinstance(part, Block):
            steps.append(Block(part.line, part.language, part.lines, about))
            about = {}
        elif about and part.strip() and not part.lstrip().startswith("<!--"):
            raise PageError(f"{name}:{line}: the comment before this line stands before no block: {about}")
        elif (match := _COMMENT.fullmatch(part.strip())) is not None:
            key, value = match["key"], match["value"] or ""
            if key == "run":
                steps.append(Hidden(line, value))
            elif key == "setting":
                settings += [each.strip() for each in value.split(",")]
            elif key == "stands for":
                shown, _, real = value.partition(" = ")
                stands_for[shown.strip()] = real.strip()
            elif key in BLOCK:
                about[key] = value
            else:
                raise PageError(f"{name}:{line}: nothing is known of {key!r}; known are {sorted(PAGE | BLOCK)} and run")
    if about:
        raise PageError(f"{name}: the last comment stands before no block: {about}")
    return Page(name, tuple(steps), frozenset(settings), stands_for)


def problems(read: Page, text: str) -> list[str]:
    """Where a page could hold a command that nobody runs, or breaks another rule; each with its line."""
    found = [
        f"{read.name}:{line}: shell commands belong into a block of their own, in a terminal: {part.strip()}"
        for line, part in _parts(text)
        if isinstance(part, str) and re.match(r" {4,}(\$ |rallyrun |rallyctl )", part)
    ]
    for block in read.blocks:
        found += [f"{read.name}:{block.line}: {problem}" for problem in _problems_of(block)]
    return found


def _problems_of(block: Block) -> Iterator[str]:
    if not block.language:
        yield "a block names its language: console, python, text, ..."
    if block.language in SHELLS and not {"file", "not run"} & block.says.keys():
        yield f"commands stand in a `console` block, a script in a file: not in {block.language}"
    if block.language == "text" and any(_HIDDEN.match(line) for line in block.lines):
        yield "commands stand in a `console` block, not in `text`"
    if "file" not in block.says and block.language != "console" and block.says.keys() - {"not run"}:
        yield f"only of a `console` block can be said {sorted(block.says)}"
    if len(block.codes) > max(1, len(block.commands)):
        yield "it has more exit statuses than commands"
    for key in ("not run", "run in"):
        if key in block.says and not block.says[key]:
            yield f"`{key}` wants a value"


def _parts(text: str) -> Iterator[tuple[int, Block | str]]:
    """Blocks, comments (whole, be they of several lines) and other lines, each with the number of its first line."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin, line = at, lines[at]
        at += 1
        if (fence := _FENCE.match(line)) is not None:
            while at < len(lines) and lines[at].strip() != fence["marks"]:
                at += 1
            indent = len(fence["indent"])
            inside = tuple(each[indent:] if not each[:indent].strip() else each for each in lines[begin + 1 : at])
            yield begin + 1, Block(begin + 1, fence["language"].strip(), inside)
            at += 1
        elif line.lstrip().startswith("<!--"):
            while "-->" not in lines[at - 1] and at < len(lines):
                at += 1
            yield begin + 1, "\n".join(lines[begin:at])
        else:
            yield begin + 1, line
