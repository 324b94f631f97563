"""The tables of the completion script for bash: functions that look up flags and values by `case`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from shlex import quote

from rallypoint.base.flags import Values
from rallypoint.cli.command_table import Command
from rallypoint.cli.completion.values import values_of
from rallypoint.cli.flags import ANYTHING


def bash_tables(rallyrun: Command, verbs: Iterable[Command]) -> str:
    """The text that stands for the tables in the template."""
    commands = [rallyrun, *verbs]
    names = " ".join(each.name.removeprefix("rallyctl ") for each in commands[1:])
    return "\n\n".join(
        (
            f"_rallypoint_verbs={quote(names)}",
            _function(
                "_rallypoint_flags",
                "The flags of the command $1, with = where they take a value, and the short ones that take one.",
                map(_flags, commands),
                start="",
            ),
            _function(
                "_rallypoint_flag",
                "What completes the value of a flag; $1 is the command and the flag.",
                (row for each in commands for row in _flag_values(each)),
            ),
            _function(
                "_rallypoint_operand",
                "What completes a word that is no flag; $1 is the command and how many such words are before it.",
                (row for each in commands for row in _operand_values(each)),
            ),
        )
    )


_NOTHING = "    kind='' known='' separator=''\n"


def _function(name: str, comment: str, rows: Iterable[tuple[str, str]], start: str = _NOTHING) -> str:
    cases = "".join(f"        {pattern}) {work} ;;\n" for pattern, work in rows)
    return f"# {comment}\n{name}() {{\n{start}    case $1 in\n{cases}        *) return 1 ;;\n    esac\n}}"


def _flags(command: Command) -> tuple[str, str]:
    flags = " ".join(f"{each.name}=" if each.metavar else each.name for each in command.options)
    short = " ".join(each.short for each in command.options if each.short and each.metavar)
    return quote(command.name), f"flags={quote(flags)} short={quote(short)}"


def _flag_values(command: Command) -> Iterator[tuple[str, str]]:
    for each in command.options:
        if each.metavar and (values := values_of(each)) != ANYTHING:
            spellings = [each.short, each.name] if each.short else [each.name]
            yield " | ".join(quote(f"{command.name} {spelling}") for spelling in spellings), _work(values)


def _operand_values(command: Command) -> Iterator[tuple[str, str]]:
    for number, each in enumerate(command.operands):
        if (values := values_of(each)) != ANYTHING:
            pattern = f"{quote(f'{command.name} ')}*" if each.repeats else quote(f"{command.name} {number}")
            yield pattern, _work(values)


def _work(values: Values) -> str:
    return f"kind={values.names} known={quote(' '.join(values.words))} separator={quote(values.separator)}"
