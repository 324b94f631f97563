"""The sentences of errors and log lines are those that were reviewed; `--rewrite-sentences` writes the file anew."""

from __future__ import annotations

import pytest

from tests.sentences import FILE, listing


def test_the_sentences_are_those_that_were_reviewed(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-sentences"):
        FILE.write_text(listing())
    assert FILE.read_text() == listing()
