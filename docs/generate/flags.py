"""The page of all flags of `rallyrun`."""

from __future__ import annotations

import tomllib
from inspect import getdoc
from pathlib import Path
from types import FunctionType
from typing import Any

from docs.generate.markdown import literal

from rallypoint.base.flags import SWITCH, Flag
from rallypoint.cli.flags import BEYOND_TORCHRUN, GROUPS

HEAD = """\
# Flags of `rallyrun`

```
rallyrun [FLAGS] SCRIPT [ARGUMENTS]
```

Write a flag with dashes or underscores (`--nproc-per-node`, `--nproc_per_node`), and its value after `=` or a space. If
an entry names a variable, the variable sets the flag's value, unless the command line does. For a flag without a value,
1 turns it on and 0 turns it off. Flags that torchrun does not have are marked.

`--help`, `--version` and `--print-completion=SHELL` (bash, fish, tcsh or zsh) print and exit. All arguments after the
script are passed to it.
"""

DETAILS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Flag to more text about it."""


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for group in GROUPS:
        title = _capital(group.title)
        parts.append(f"## {title}\n\nExample: `rallyrun {group.example}`\n")
        parts.extend(_entry(flag) for flag in group.flags)
    return "\n".join(parts)


def _entry(flag: Flag[Any]) -> str:
    value = "" if flag.read is SWITCH else f"={flag.metavar}"
    names = [literal(flag.name + value), *([literal(flag.short)] if flag.short else [])]
    facts = [
        *([f"Value: {_kind(flag)}"] if flag.read is not SWITCH else []),
        f"default: {_default(flag)}",
        f"variable: {literal(flag.variable)}" if flag.from_environment else "no variable",
        "not in torchrun" if flag.dest in BEYOND_TORCHRUN else "same as torchrun",
    ]
    more = f" {DETAILS[flag.name]}" if flag.name in DETAILS else ""
    return f"### `{flag.name}`\n\n{', '.join(names)}: {flag.help}.{more}\n\n{_capital('; '.join(facts))}.\n"


def _kind(flag: Flag[Any]) -> str:
    """The kind of its value."""
    if flag.words:
        return f"one of {', '.join(map(literal, flag.words))}"
    if not isinstance(flag.read, FunctionType):
        return "text"
    text = (getdoc(flag.read) or f"a {flag.read.__name__.replace('_', ' ')}").partition(".")[0]
    return text[:1].lower() + text[1:]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _default(flag: Flag[Any]) -> str:
    if flag.read is SWITCH:
        return "off"
    if flag.default is None or flag.default in ("", ()):
        return "none"
    return literal(f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default))
