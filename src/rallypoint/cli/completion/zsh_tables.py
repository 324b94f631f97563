"""The tables of the completion script for zsh: the arguments of `_arguments` for each command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from shlex import quote

from rallypoint.base.flags import Values
from rallypoint.cli.command_table import Command, Operand, Option
from rallypoint.cli.completion.values import Names, values_of


def zsh_tables(rallyrun: Command, verbs: Iterable[Command]) -> str:
    """The text that stands for the tables in the template."""
    known = list(verbs)
    described = "".join(f"    {quote(_described(each))}\n" for each in known)
    cases = "".join(_case(each) for each in (rallyrun, *known))
    return (
        f"typeset -ga _rallypoint_verbs=(\n{described})\n\n"
        f"# Completes the flags and words of the command $1.\n"
        f"_rallypoint_arguments() {{\n    case $1 in\n{cases}        *) return 1 ;;\n    esac\n}}"
    )


def _described(verb: Command) -> str:
    return f"{verb.name.partition(' ')[2]}:{_plain(verb.summary, ':')}"


def _case(command: Command) -> str:
    rows = [
        *(row for each in command.options for row in _option(each)),
        *(_operand(number, each) for number, each in enumerate(command.operands, 1)),
    ]
    lines = "".join(f" \\\n                {row}" for row in rows)
    return f"        {quote(command.name)})\n            _arguments -S -A '-*'{lines}\n            ;;\n"


def _option(option: Option) -> Iterator[str]:
    """The specifications of its spellings, as words of the shell."""
    text = f"[{_plain(option.help, '[]')}]"
    value = f":{_plain(option.metavar, ':')}:{_action(values_of(option))}" if option.metavar else ""
    spellings = [option.short, option.name] if option.short else [option.name]
    others = "*" if option.repeats else f"({' '.join(spellings)})" if len(spellings) > 1 else ""
    for each in spellings:
        equals = "=" if value and each.startswith("--") else ""
        yield quote(f"{others}{each}{equals}{text}{value}")


def _operand(number: int, operand: Operand) -> str:
    values = values_of(operand)
    place = "*::" if operand.rest else "*:" if operand.repeats else f"{number}:" if operand.required else f"{number}::"
    action = "_normal" if values.names == Names.COMMAND else _action(values)
    return quote(f"{place}{_plain(operand.metavar, ':')}:{action}")


def _action(values: Values) -> str:
    words = " ".join(quote(each) for each in values.words)
    return f" _rallypoint_value {values.names} {quote(values.separator)} {words}".replace(":", "\\:").rstrip()


def _plain(text: str, special: str) -> str:
    """A text with these characters escaped."""
    return "".join(f"\\{each}" if each in special or each == "\\" else each for each in text)
