"""The reference has all flags, options, variables, events and messages, and no others."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import get_args

import pytest
from docs.generate import environment, flags, rallyctl, rdzv_conf, torch_names
from docs.repository_links import DOCS

from rallypoint.cli.convert import OURS
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.verdict import CODES, IN_PLACE, SUCCESS, verdict_of
from rallypoint.compat.names import HOMES, MODULES
from rallypoint.failures.cause import Ending
from rallypoint.observe.telemetry.agent_events import KINDS, AgentEvent, Failure
from rallypoint.rendezvous.backends.option_table import OPTIONS
from tests.sentences import SOURCE, VALUE, texts_of, trees

OF_LIBRARIES = frozenset({"NO_COLOR"})
"""Variables of libraries."""

_VARIABLE = re.compile(r"(?!(?:AF|MSG|SC|TCP)_)[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""Environment variables, without constants of the kernel."""


def test_flags() -> None:
    assert flags.DETAILS.keys() <= {flag.name for flag in FLAGS}
    page = flags.page()
    assert re.findall(r"^### `(.*)`$", page, re.MULTILINE) == [flag.name for flag in FLAGS]
    for flag in FLAGS:
        assert flag.help in page
        assert not flag.from_environment or f"variable: `{flag.variable}`" in page


def test_verbs() -> None:
    page = rallyctl.page()
    assert len(rallyctl.verbs()) > 10
    for name, parser in rallyctl.verbs().items():
        section = page.split(f"\n## `rallyctl {name}`\n")[1].split("\n## ")[0]
        shown = [action.option_strings[-1] for action in parser._actions if action.option_strings]
        assert [flag for flag in shown if flag != "--help" and f"`{flag}" not in section] == []


def test_rendezvous_options() -> None:
    page = rdzv_conf.page()
    assert [option.name for option in OPTIONS if f"| `{option.name}` |" not in page] == []
    assert [option.name for option in OPTIONS if not option.meaning.endswith(".")] == []


def test_torch_names() -> None:
    page = torch_names.page()
    names = [name for names in HOMES.values() for name in names.split()]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert [path for path in MODULES if f"`rallypoint.compat.{path}`" not in page] == []


def test_environment_variables() -> None:
    entries = {name for titles in environment.GROUPS.values() for names in titles.values() for name in names}
    constants = {text for tree in trees().values() for text in _constants(tree)} | OURS
    found = {text for text in constants if _VARIABLE.fullmatch(text)} | OURS
    missing = found - entries - {flag.variable for flag in FLAGS} - environment.NO_VARIABLES
    assert missing == set(), "add them to docs/generate/environment.toml"
    assert environment.NO_VARIABLES - found == set()
    assert entries - constants - OF_LIBRARIES == set(), "remove them from docs/generate/environment.toml"


def _constants(tree: ast.Module) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


# Handwritten pages


EVENTS = (DOCS / "reference" / "events.md").read_text()
EXIT_CODES = (DOCS / "reference" / "exit-codes.md").read_text()
EVENT_TYPES: dict[str, type[AgentEvent]] = {str(kind.__struct_config__.tag): kind for kind in get_args(KINDS)}


def _section(kind: str) -> str:
    """The section of an event, from its name to the next."""
    found = re.search(rf"^\*\*`{kind}`\*\*.*?(?=^\*\*`|^A `failure`|^## )", EVENTS, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def _in_first_column(text: str) -> set[str]:
    return {name for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_fields_of_events(kind: str) -> None:
    fields = set(EVENT_TYPES[kind].__struct_fields__) - set(AgentEvent.__struct_fields__)
    section = _section(kind)
    assert [field for field in fields if f"`{field}`" not in section] == []
    assert _in_first_column(section) <= fields


def test_common_fields_of_events() -> None:
    assert set(re.findall(r"^\*\*`(\w+)`\*\*", EVENTS, re.MULTILINE)) == EVENT_TYPES.keys()
    common = EVENTS.split("## Fields of every line")[1].split("## ")[0]
    assert _in_first_column(common) == {"event", *AgentEvent.__struct_fields__}
    failure = next(text for text in EVENTS.split("\n\n") if text.startswith("A `failure` object"))
    assert [field for field in Failure.__struct_fields__ if f"`{field}`" not in failure] == []


def test_exit_codes() -> None:
    rows = {(row[1], row[2]) for row in re.finditer(r"^\| (\d+) \| `(\w+)` \|", EXIT_CODES, re.MULTILINE)}
    in_place = (str(IN_PLACE), Ending.INFRASTRUCTURE.name.lower())
    assert rows == {(str(code), ending.name.lower()) for ending, code in CODES.items()} | {in_place}
    assert _in_first_column(EXIT_CODES.split("## The verdict")[1]) == verdict_of(None, SUCCESS, 0, "job").keys()


# Messages in the pages of symptoms and messages


SYMPTOMS = DOCS / "troubleshooting.md"
MESSAGES = DOCS / "reference" / "messages.md"

_LEAST = 6
"""The least length of a piece of text."""


def _quoted() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", SYMPTOMS.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@cache
def _texts() -> str:
    """All texts of the source, one per line."""
    return "\n".join(text for tree in trees().values() for text in texts_of(tree))


@cache
def _pieces() -> tuple[str, ...]:
    """The pieces between the values of these texts, the longest first."""
    pieces = {piece.strip() for text in _texts().splitlines() for piece in text.split(VALUE)}
    return tuple(sorted((piece for piece in pieces if len(piece) >= _LEAST), key=len, reverse=True))


def _known(line: str) -> float:
    """The share of a line's letters in texts of the source."""
    rest = line
    for text in _pieces():
        rest = rest.replace(text, "\0")
    return 1 - _letters(rest) / _letters(line)


def _letters(text: str) -> int:
    return sum(letter.isalpha() for letter in text)


@pytest.mark.parametrize("line", _quoted())
def test_quoted_sentences_are_in_the_source(line: str) -> None:
    """The rest are values and short pieces."""
    assert _known(line) >= 0.6


def test_explained_messages_are_in_the_source() -> None:
    source = _texts() + " ".join(path.read_text() for path in (SOURCE / "store" / "native").glob("*.[ch]"))
    explained = re.findall(r"(?m)^- (`+) ?(.*?) ?\1: .*\*What to do:\*", MESSAGES.read_text())
    assert len(explained) > 150
    pieces = [piece.strip() for _, text in explained for piece in text.split(VALUE)]
    assert [piece for piece in pieces if len(piece) >= _LEAST and piece not in source] == []
