"""What the page of symptoms says that Rallypoint says is in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

_VALUE = re.compile(r"%(?:\.\d+)?[a-z%]|\{\w*\}|\0")
"""What stands for a value in a text of the source: a conversion of `%`, or a field of a format or an f-string."""
_LEAST = 6
"""Characters of a text of the source below which it says nothing by itself."""


def _quoted() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@cache
def _texts() -> tuple[str, ...]:
    """The pieces of all texts of the source between their values, long ones first."""
    found = {
        piece.strip()
        for path in (ROOT / "src").rglob("*.py")
        for text in _strings(ast.parse(path.read_text()))
        for piece in _VALUE.split(text)
        if len(piece.strip()) >= _LEAST
    }
    return tuple(sorted(found, key=len, reverse=True))


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)


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
