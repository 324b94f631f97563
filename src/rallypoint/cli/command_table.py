"""The command lines of `rallyrun` and `rallyctl`, as data read from their parsers.

Completions and manual pages are generated from it, so that no flag or verb is written twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple


class Option(NamedTuple):
    """A flag. `name` is its long, dashed spelling; `short` may be empty.

    `metavar` stands for its value, and is empty if it takes none; `words` are its values, if these are all; `repeats`
    says that it may be given several times; `help` is one sentence without its full stop.
    """

    name: str
    short: str
    metavar: str
    help: str
    words: tuple[str, ...]
    repeats: bool


class Operand(NamedTuple):
    """A word that is not a flag. `rest` says that it stands for all words from there on, flags or not."""

    dest: str
    metavar: str
    help: str
    words: tuple[str, ...]
    required: bool
    repeats: bool
    rest: bool


class OptionGroup(NamedTuple):
    """Flags of one subject; the title may be empty, and so may the example, a whole command line."""

    title: str
    example: str
    options: tuple[Option, ...]


class Command(NamedTuple):
    """`rallyrun`, or `rallyctl` with a verb (in `name` too, after a space); `summary` is its line in a list."""

    name: str
    summary: str
    description: str
    example: str
    operands: tuple[Operand, ...]
    groups: tuple[OptionGroup, ...]

    @property
    def options(self) -> Iterator[Option]:
        """The options of all groups."""
        return (option for group in self.groups for option in group.options)


def read_command(parser: argparse.ArgumentParser, name: str, summary: str = "") -> Command:
    """Read the command line that a parser takes.

    Args:
        parser: the parser of one command, without verbs.
        name: the name of the command.
        summary: a short description.
    """
    operands = tuple(_operand(each) for each in parser._actions if not each.option_strings)
    groups = tuple(group for each in parser._action_groups if (group := _group(each, name)).options)
    text = " ".join((parser.description or "").split())
    return Command(name, summary, text, _example(parser.epilog, name), operands, groups)


def read_verbs(parser: argparse.ArgumentParser, name: str) -> tuple[Command, ...]:
    """Read the command line of each verb of a parser, in the order of its help page."""
    verbs = find_verbs(parser)
    summaries = {each.dest: each.help or "" for each in verbs._choices_actions}
    return tuple(read_command(page, f"{name} {verb}", summaries[verb]) for verb, page in verbs.choices.items())


def find_verbs(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """The action that holds the parser of each verb, in its `choices`."""
    (found,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return found


def _group(group: argparse._ArgumentGroup, name: str) -> OptionGroup:
    flags = [each for each in group._group_actions if each.option_strings]
    title = "" if group.title in ("options", "positional arguments") else group.title or ""
    return OptionGroup(
        title, _example(group.description, name), tuple(each for action in flags for each in _options(action))
    )


def _example(text: str | None, name: str) -> str:
    """The command line after `example: `."""
    command = (text or "").partition("example: ")[2]
    return command.replace("%(prog)s", name)


def _options(action: argparse.Action) -> Iterator[Option]:
    """The flags of an action: one, or two if the other (`--no-...`) is its opposite. Underscores are left out."""
    names = [each for each in action.option_strings if each.startswith("--") and "_" not in each]
    short = next((each for each in action.option_strings if not each.startswith("--")), "")
    metavar = "" if action.nargs == 0 else str(action.metavar)
    repeats = isinstance(action, argparse._AppendAction)
    for name in names:
        yield Option(name, short if name == names[0] else "", metavar, _help(action), _words(action), repeats)


def _operand(action: argparse.Action) -> Operand:
    rest = action.nargs == argparse.REMAINDER
    required = action.nargs not in ("?", "*", argparse.REMAINDER)
    metavar = str(action.metavar or action.dest)
    return Operand(action.dest, metavar, _help(action), _words(action), required, action.nargs in ("*", "+"), rest)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _words(action: argparse.Action) -> tuple[str, ...]:
    """All possible values, from the choices, or from the reader (`OneOf`) of its text."""
    if action.choices is not None:
        return tuple(str(each) for each in action.choices)
    words: tuple[str, ...] = getattr(action.type, "words", ())
    return words
