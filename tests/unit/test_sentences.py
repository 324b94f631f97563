"""The sentences of errors and log lines are those that were reviewed; `--rewrite-sentences` writes the file anew."""

from __future__ import annotations

import ast

import pytest

from tests.sentences import FILE, listing, said


def test_the_sentences_are_those_that_were_reviewed(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-sentences"):
        FILE.write_text(listing())
    assert FILE.read_text() == listing()


def test_sentences_of_each_kind_are_found() -> None:
    source = """
def f(x):
    'A docstring of three words.'
    log.warning("%d nodes are away", x)
    if x: raise UsageError(f"{x!r} is wrong; " "give another" if x else "give it")
    print_error('one sentence')
    shown = "no sentence of these"
"""
    assert sorted(said(ast.parse(source))) == [
        "give it",
        "one sentence",
        "… is wrong; give another",
        "… nodes are away",
    ]
