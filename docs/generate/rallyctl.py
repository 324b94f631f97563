"""The page of all verbs of `rallyctl` and their flags, from its parser."""

from __future__ import annotations

import argparse
import textwrap

from docs.generate.markdown import literal

from rallypoint.cli.rallyctl import build_parser
from rallypoint.cli.verbs import VERBS, Verb

HEAD = """\
# Verbs and flags of `rallyctl`

`rallyctl` runs outside jobs. It watches and controls them, and runs services for them. `rallyctl VERB --help` prints
the same text, and `rallyctl --version` prints the version.
"""


def page() -> str:
    """The page, in Markdown."""
    parsers = verbs()
    return "\n".join([HEAD, *(_verb(verb, parsers[verb.name]) for verb in VERBS)])


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Each verb's parser, by its name."""
    (found,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(found.choices)


def _verb(verb: Verb, parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    parts = [f"## `rallyctl {verb.name}`\n", f"```\n{usage}\n```\n", f"{_paragraphs(verb.text)}\n"]
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if not isinstance(each, argparse._HelpAction)]
        parts += [*(f"- {_argument(parser, each)}" for each in shown), *([""] if shown else [])]
    parts += ["```console"]
    for comment, words in verb.examples:
        parts += [f"$ {f'rallyctl {verb.name} {words}'.rstrip():<40}  # {comment}"]
    parts += ["```\n"]
    if verb.exit_codes:
        parts += ["Exit codes:\n", *(f"- {code}: {meaning}" for code, meaning in verb.exit_codes), ""]
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    """The text, with its indented lines as a block."""
    found = [f"```\n{textwrap.dedent(each)}\n```" if each.startswith("  ") else each for each in text.split("\n\n")]
    return "\n\n".join(found)


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = "" if action.nargs == 0 else metavar
    name = ", ".join(
        literal(f"{each}={value}" if value and each.startswith("--") else each) for each in action.option_strings
    )
    text = action.help % vars(action) if action.help else ""
    return f"{name or literal(metavar)}: {text}"
