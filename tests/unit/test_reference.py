"""Everything that can be set has an entry in the reference, and each entry describes something that exists."""

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
"""Variables that a library reads which we use."""

_VARIABLE = re.compile(r"(?!(?:AF|MSG|SC|TCP)_)[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""What looks like an environment variable, and is no constant of the kernel."""


def test_each_flag_has_a_heading_and_its_facts() -> None:
    page = flags.page()
    assert re.findall(r"^### `(.*)`$", page, re.MULTILINE) == [flag.name for flag in FLAGS]
    for flag in FLAGS:
        assert flag.help in page
        assert not flag.from_environment or f"variable: `{flag.variable}`" in page


def test_what_is_said_of_flags_is_said_of_flags() -> None:
    assert flags.DETAILS.keys() - {flag.name for flag in FLAGS} == set()


def test_each_verb_and_each_of_its_flags_is_shown() -> None:
    page = rallyctl.page()
    assert len(rallyctl.verbs()) > 10
    for name, parser in rallyctl.verbs().items():
        section = page.split(f"\n## `rallyctl {name}`\n")[1].split("\n## ")[0]
        shown = [action.option_strings[-1] for action in parser._actions if action.option_strings]
        assert [each for each in shown if each != "--help" and f"`{each}" not in section] == []


def test_each_option_of_a_rendezvous_has_a_row_with_its_meaning() -> None:
    page = rdzv_conf.page()
    assert [option.name for option in OPTIONS if f"| `{option.name}` |" not in page] == []
    assert [option.name for option in OPTIONS if not option.meaning.endswith(".")] == []


def test_each_module_of_torchs_and_each_name_that_is_ours_is_listed() -> None:
    page = torch_names.page()
    names = [name for names in HOMES.values() for name in names.split()]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert [path for path in MODULES if f"`rallypoint.compat.{path}`" not in page] == []


def test_each_variable_of_the_source_has_an_entry() -> None:
    told = {name for titles in environment.GROUPS.values() for names in titles.values() for name in names}
    of_flags = {flag.variable for flag in FLAGS}
    found = {text for tree in trees().values() for text in _constants(tree) if _VARIABLE.fullmatch(text)} | OURS
    missing = found - told - of_flags - environment.NO_VARIABLES
    assert missing == set(), "give each an entry in docs/generate/environment.toml"
    assert environment.NO_VARIABLES - found == set()


def test_each_entry_is_a_variable_of_the_source() -> None:
    told = {name for titles in environment.GROUPS.values() for names in titles.values() for name in names}
    source = {text for tree in trees().values() for text in _constants(tree)} | OURS | OF_LIBRARIES
    assert told - source == set(), "take them out of docs/generate/environment.toml"


def _constants(tree: ast.Module) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


# Tables of pages that are written by hand name what the code has, and nothing else


EVENTS = (DOCS / "reference" / "events.md").read_text()
EXIT_CODES = (DOCS / "reference" / "exit-codes.md").read_text()
EVENT_TYPES: dict[str, type[AgentEvent]] = {str(kind.__struct_config__.tag): kind for kind in get_args(KINDS)}


def _section(kind: str) -> str:
    """What is said of one kind of event: from its name to the next."""
    found = re.search(rf"^\*\*`{kind}`\*\*.*?(?=^\*\*`|^A `failure`|^## )", EVENTS, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def _in_first_column(text: str) -> set[str]:
    return {name for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}


def test_each_kind_of_event_is_described_and_no_other() -> None:
    assert set(re.findall(r"^\*\*`(\w+)`\*\*", EVENTS, re.MULTILINE)) == EVENT_TYPES.keys()


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_each_field_of_an_event_is_described_and_no_other(kind: str) -> None:
    fields = set(EVENT_TYPES[kind].__struct_fields__) - set(AgentEvent.__struct_fields__)
    section = _section(kind)
    assert [field for field in fields if f"`{field}`" not in section] == []
    assert _in_first_column(section) <= fields


def test_the_fields_of_every_line_are_described_and_no_other() -> None:
    common = EVENTS.split("## Fields of every line")[1].split("## ")[0]
    assert _in_first_column(common) == {"event", *AgentEvent.__struct_fields__}
    failure = next(text for text in EVENTS.split("\n\n") if text.startswith("A `failure` object"))
    assert [field for field in Failure.__struct_fields__ if f"`{field}`" not in failure] == []


def test_each_exit_code_has_the_row_of_its_ending() -> None:
    rows = {(row[1], row[2]) for row in re.finditer(r"^\| (\d+) \| `(\w+)` \|", EXIT_CODES, re.MULTILINE)}
    in_place = (str(IN_PLACE), Ending.INFRASTRUCTURE.name.lower())
    assert rows == {(str(code), ending.name.lower()) for ending, code in CODES.items()} | {in_place}


def test_each_field_of_a_verdict_is_described_and_no_other() -> None:
    told = EXIT_CODES.split("## The verdict")[1]
    assert _in_first_column(told) == verdict_of(None, SUCCESS, 0, "job").keys()


# What the pages of symptoms and of messages say that Rallypoint says is in the source


SYMPTOMS = DOCS / "troubleshooting.md"
MESSAGES = DOCS / "reference" / "messages.md"

_LEAST = 6
"""Characters of a text of the source below which it says nothing by itself."""


def _quoted() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", SYMPTOMS.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@cache
def _texts() -> str:
    """All texts of the source, one a line."""
    return "\n".join(text for tree in trees().values() for text in texts_of(tree))


@cache
def _pieces() -> tuple[str, ...]:
    """The pieces of these texts between their values, long ones first."""
    pieces = {piece.strip() for text in _texts().splitlines() for piece in text.split(VALUE)}
    return tuple(sorted((piece for piece in pieces if len(piece) >= _LEAST), key=len, reverse=True))


def _known(line: str) -> float:
    """The part of a line's letters that are texts of the source."""
    rest = line
    for text in _pieces():
        rest = rest.replace(text, "\0")
    return 1 - _letters(rest) / _letters(line)


def _letters(text: str) -> int:
    return sum(each.isalpha() for each in text)


@pytest.mark.parametrize("line", _quoted())
def test_a_sentence_of_the_page_is_put_together_of_texts_of_the_source(line: str) -> None:
    """The rest are its values, and pieces too short to be told from others."""
    assert _known(line) >= 0.6


def test_each_message_that_is_explained_is_in_the_source() -> None:
    source = _texts() + " ".join(path.read_text() for path in (SOURCE / "store" / "native").glob("*.[ch]"))
    explained = re.findall(r"(?m)^- (`+) ?(.*?) ?\1: .*\*What to do:\*", MESSAGES.read_text())
    assert len(explained) > 150
    pieces = [piece.strip() for _, text in explained for piece in text.split(VALUE)]
    assert [piece for piece in pieces if len(piece) >= _LEAST and piece not in source] == []
