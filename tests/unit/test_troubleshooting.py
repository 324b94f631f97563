"""What the page of symptoms says that Rallypoint says is in the source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from docs.generate.source import VALUE, texts_of, trees

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

_LEAST = 6
"""Characters of a text of the source below which it says nothing by itself."""


def _quoted() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@cache
def _texts() -> tuple[str, ...]:
    """The pieces of all texts of the source between their values, long ones first."""
    pieces = {piece.strip() for file in trees() for text in texts_of(file) for piece in text.split(VALUE)}
    return tuple(sorted((piece for piece in pieces if len(piece) >= _LEAST), key=len, reverse=True))


def _known(line: str) -> float:
    """The part of a line's letters that are texts of the source."""
    rest = line
    for text in _texts():
        rest = rest.replace(text, "\0")
    return 1 - _letters(rest) / _letters(line)


def _letters(text: str) -> int:
    return sum(each.isalpha() for each in text)


@pytest.mark.parametrize("line", _quoted())
def test_a_sentence_of_the_page_is_put_together_of_texts_of_the_source(line: str) -> None:
    """The rest are its values, and pieces too short to be told from others."""
    assert _known(line) >= 0.6


def test_a_sentence_that_nobody_says_is_not() -> None:
    assert _known("the launcher has noticed that this machine went away; look whether its cable is plugged in") < 0.3


def test_there_are_thirty_symptoms() -> None:
    assert len(re.findall(r"^### ", PAGE.read_text(), re.M)) >= 30
    assert len(_quoted()) > 15
