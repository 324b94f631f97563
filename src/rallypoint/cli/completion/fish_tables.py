"""The tables of the completion script for fish: one line of `complete` for each flag, verb and operand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rallypoint.base.flags import Values
from rallypoint.cli.command_table import Command, Operand, Option
from rallypoint.cli.completion.values import Names, values_of


def fish_tables(rallyrun: Command, verbs: Iterable[Command]) -> str:
    """The text that stands for the tables in the template."""
    known = list(verbs)
    return "\n".join(
        line
        for lines in (_valued([rallyrun, *known]), _verbs(known), *map(_command, (rallyrun, *known)))
        for line in lines
    )


def _valued(commands: Iterable[Command]) -> Iterator[str]:
    """The flags that take a value."""
    for each in commands:
        flags = [flag for option in each.options if option.metavar for flag in (option.name, option.short) if flag]
        yield f"set -g __rallypoint_valued_{_verb(each)} {' '.join(flags)}"


def _verbs(verbs: Iterable[Command]) -> Iterator[str]:
    start = "complete -c rallyctl -n __rallypoint_needs_verb"
    yield f"{start} -f"
    yield f"{start} -l help -d 'Show the help page'"
    yield f"{start} -l version -d 'Show the version'"
    for each in verbs:
        yield f"{start} -a {_verb(each)} -d {quoted(each.summary)}"


def _command(command: Command) -> Iterator[str]:
    program, verb = command.name.partition(" ")[0], _verb(command)
    rest = next(
        (number for number, each in enumerate(command.operands) if each.rest or values_of(each).names == Names.SCRIPT),
        None,
    )
    flags = f"__rallypoint_at {verb}" + ("" if rest is None else f" {rest}")
    for option in command.options:
        yield f"complete -c {program} -n {quoted(flags)} {_option(option)}"
        if "-" in option.name[2:]:
            condition = f"__rallypoint_underscores; and {flags}"
            yield f"complete -c {program} -n {quoted(condition)} {_option(option, torchrun=True)}"
    for number, operand in enumerate(command.operands):
        place = "" if operand.repeats or values_of(operand).names == Names.COMMAND else f" {number}"
        yield f"complete -c {program} -n {quoted(f'__rallypoint_at {verb}{place}')} {_operand(operand)}"


def _verb(command: Command) -> str:
    return command.name.rpartition(" ")[2]


def _option(option: Option, *, torchrun: bool = False) -> str:
    """The completion of a flag; for `torchrun` in its own spelling, with underscores."""
    short = f"-s {option.short[1:]} " if option.short and not torchrun else ""
    name = option.name[2:].replace("-", "_") if torchrun else option.name[2:]
    value = f" {_value(values_of(option))}" if option.metavar else ""
    return f"{short}-l {name}{value} -d {quoted(option.help)}"


def _value(values: Values) -> str:
    if values.names == Names.FILE and not values.separator:
        return "-r -F"
    return f"-x -a {quoted(_call(values))}"


def _operand(operand: Operand) -> str:
    values = values_of(operand)
    if values.names == Names.COMMAND:
        return "-f -a '(__rallypoint_command)'"
    return "-F" if values.names == Names.FILE else f"-f -a {quoted(_call(values))}"


def _call(values: Values) -> str:
    words = " ".join((str(values.names), quoted(values.separator), *values.words))
    return f"(__rallypoint_value {words})"


def quoted(text: str) -> str:
    """A text as one word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
