"""The page of all verbs of `rallyctl` and their flags, from its parser."""

from __future__ import annotations

import argparse

from docs.generate.markdown import literal

from rallypoint.cli.rallyctl import build_parser

HEAD = """\
# Verbs and flags of `rallyctl`

`rallyctl` runs outside jobs: it inspects and controls them, and runs services for them. `rallyctl VERB --help` shows
the same text. `--version` prints the version.
"""


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *(_verb(name, each) for name, each in verbs().items())])


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Each verb's parser, by its name."""
    (found,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(found.choices)


def _verb(name: str, parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    parts = [f"## `rallyctl {name}`\n", f"```\n{usage}\n```\n", f"{parser.description}\n"]
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if not isinstance(each, argparse._HelpAction)]
        parts += [*(f"- {_argument(parser, each)}" for each in shown), *([""] if shown else [])]
    if parser.epilog:
        parts.append(f"{_sentence(parser.epilog)}\n")
    return "\n".join(parts)


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = "" if action.nargs == 0 else metavar
    name = ", ".join(
        literal(f"{each}={value}" if value and each.startswith("--") else each) for each in action.option_strings
    )
    text = action.help % vars(action) if action.help else ""
    return f"{name or literal(metavar)}: {text}"


def _sentence(epilog: str) -> str:
    head, found, example = epilog.partition("example: ")
    return f"{head}Example: {literal(example)}" if found else epilog
