"""The page of all flags of `rallyrun`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from docs.generate.markdown import literal

from rallypoint.cli.flag_types import SWITCH, Flag
from rallypoint.cli.flags import BEYOND_TORCHRUN, GROUPS

HEAD = """\
# Flags of `rallyrun`

```
rallyrun [FLAGS] SCRIPT [ARGUMENTS]
```

Each flag can be written with dashes or underscores (`--nproc-per-node`, `--nproc_per_node`), and its value behind `=`
or a space. Where a variable is named, it gives the flag's value if the command line does not; of a flag without a
value, 1 switches it on and 0 off. Flags that torchrun does not have say so.

`--help` and `--version` print and exit. What follows the script belongs to the script.
"""

DETAILS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Flags to more about them."""


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for group in GROUPS:
        title = group.title[:1].upper() + group.title[1:]
        parts.append(f"## {title}\n\nExample: `rallyrun {group.example}`\n")
        parts.extend(_entry(flag) for flag in group.flags)
    return "\n".join(parts)


def _entry(flag: Flag) -> str:
    value = "" if flag.read is SWITCH else f"={flag.metavar}"
    names = [literal(flag.name + value), *([literal(flag.short)] if flag.short else [])]
    facts = [
        f"Default: {_default(flag)}",
        f"variable: {literal(flag.variable)}" if flag.from_environment else "no variable",
        *([f"one of {', '.join(map(literal, flag.choices))}"] if flag.choices else []),
        "not in torchrun" if flag.dest in BEYOND_TORCHRUN else "as torchrun",
    ]
    more = f" {DETAILS[flag.name]}" if flag.name in DETAILS else ""
    return f"### `{flag.name}`\n\n{', '.join(names)}: {flag.help}.{more}\n\n{'; '.join(facts)}.\n"


def _default(flag: Flag) -> str:
    if flag.read is SWITCH:
        return "off"
    if flag.default is None or flag.default in ("", ()):
        return "none"
    return literal(f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default))
