"""What the pages of symptoms and of messages say that Rallypoint says is in the source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.sentences import SOURCE, VALUE, texts_of, trees

DOCS = Path(__file__).parents[2] / "docs"
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
