"""Placeholders in arguments, against the standard library's own template."""

from __future__ import annotations

from string import Template

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.workers.context import macros

PIECES = st.lists(st.sampled_from(["$", "${local_rank}", "$local_rank", "{", "}", "${other}", "x", " ", "$$"]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("${local_rank}", "7"),
        ("a$local_rank", "a7"),
        ("$$x", "$x"),
        ("${other} $", "${other} $"),
        ("$local_ranks", "$local_ranks"),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert macros.substitute([text], "7") == [expected]


@given(PIECES)
def test_as_the_template_does(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert macros.substitute([text], "3") == [Template(text).safe_substitute(local_rank="3")]


def test_what_is_no_text_stays_itself() -> None:
    thing = object()
    assert macros.substitute([thing, 1, macros.local_rank], "2") == [thing, 1, "2"]
