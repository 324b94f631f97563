"""Tables of pages that are written by hand name what the code has, and nothing else."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from docs.repository_links import DOCS

from rallypoint.cli.verdict import CODES, SUCCESS, verdict_of
from rallypoint.observe.telemetry.agent_events import KINDS, AgentEvent, Failure

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
    failure = next(line for line in EVENTS.splitlines() if line.startswith("A `failure` has"))
    assert [field for field in Failure.__struct_fields__ if f"`{field}`" not in failure] == []


def test_each_exit_code_has_the_row_of_its_ending() -> None:
    rows = {(row[1], row[2]) for row in re.finditer(r"^\| (\d+) \| `(\w+)` \|", EXIT_CODES, re.MULTILINE)}
    assert rows == {(str(code), ending.name.lower()) for ending, code in CODES.items()}


def test_each_field_of_a_verdict_is_described_and_no_other() -> None:
    told = EXIT_CODES.split("## The verdict")[1]
    assert _in_first_column(told) == verdict_of(None, SUCCESS, 0, "job").keys()
