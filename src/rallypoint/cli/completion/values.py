"""The completions of a flag's value, or of an operand: some words, and names that the shell finds."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from rallypoint.base.flags import Values
from rallypoint.cli.command_table import Operand, Option
from rallypoint.cli.flags import ANYTHING, FLAGS


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
def _by_flag() -> dict[str, Values]:
    """The values of flags with these names, and of operands."""
    from rallypoint.preflight.run import NAMES

    host, hosts = Values(names=Names.HOST), Values(names=Names.HOST, separator=",")
    some_hosts = Values(names=Names.HOST, separator="@")
    columns = {flag.name: flag.complete for flag in FLAGS if flag.complete is not None}
    return {
        **{name: each if isinstance(each, Values) else each() for name, each in columns.items()},
        "--require": Values(NAMES, separator=","),
        "--hosts": hosts,
        "--include": some_hosts,
        "--exclude": some_hosts,
        "--env": Values(names=Names.VARIABLE),
        "training_script": Values(names=Names.SCRIPT),
        "training_script_args": Values(names=Names.FILE),
        "command": Values(names=Names.COMMAND),
        "node": host,
        "--tls-peer": ANYTHING,
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
    found = _by_flag().get(name) or _BY_METAVAR.get(each.metavar)
    if found is None:
        raise LookupError(f"what completes {name} {each.metavar} is in no table of {__name__}")
    return found
