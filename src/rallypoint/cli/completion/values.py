"""The completions of a flag's value, or of an operand: some words, and names that the shell finds."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from rallypoint.base.flags import Values
from rallypoint.cli.command_table import Operand, Option
from rallypoint.cli.flags import ANYTHING, FLAGS
from rallypoint.cli.rallyctl import VERBS


class Names(StrEnum):
    """Kinds of names that are found when TAB is pressed; the values are their names in the shell code."""

    NONE = "none"
    FILE = "file"
    FOLDER = "folder"
    HOST = "host"
    PROGRAM = "program"
    VARIABLE = "variable"
    INTERFACE = "interface"
    SCRIPT = "script"
    """Programs for `rallyrun`: Python files and folders; modules after `-m`, programs after `--no-python`."""
    COMMAND = "command"
    """A command line of its own, which completes itself."""


@cache
def _by_name() -> dict[str, Values]:
    """What the rows of flags and of verbs say, by the names of flags and operands."""
    arguments = [each for verb in VERBS for each in verb.arguments if not isinstance(each, str)]
    rows = [*((flag.name, flag.complete) for flag in FLAGS), *((each.names[-1], each.complete) for each in arguments)]
    columns = {name: each if isinstance(each, Values) else each() for name, each in rows if each is not None}
    return columns | {
        "training_script": Values(names=Names.SCRIPT),
        "training_script_args": Values(names=Names.FILE),
    }


_BY_METAVAR = {
    **dict.fromkeys(("FILE", "PATH"), Values(names=Names.FILE)),
    **dict.fromkeys(("DIR",), Values(names=Names.FOLDER)),
    **dict.fromkeys(("ADDRESS", "ENDPOINT", "HOST:PORT", "[HOST:]PORT"), Values(names=Names.HOST)),
    **dict.fromkeys(("N", "S", "SECONDS", "PORT", "RANK", "RANKS", "ID", "TEXTS", "ARGS", "MIN:MAX"), ANYTHING),
}
"""The values of the others, by their metavar on the help page."""


def values_of(each: Option | Operand) -> Values:
    """The completions of a flag or an operand.

    Raises:
        LookupError: it is in none of the tables here.
    """
    name = each.name if isinstance(each, Option) else each.dest
    if each.words:
        return Values(each.words)
    found = _by_name().get(name) or _BY_METAVAR.get(each.metavar)
    if found is None:
        raise LookupError(f"what completes {name} {each.metavar} is in no table of {__name__}")
    return found
