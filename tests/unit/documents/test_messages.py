"""Each line that is logged has an entry in the reference, and each entry is of a line that is there."""

from __future__ import annotations

import pytest
from docs.generate import log_lines
from docs.generate.markdown import literal
from docs.generate.source import texts_of, trees

LINES = [each for each in log_lines.lines() if not log_lines.is_passed_on(each.text)]


def test_lines_are_found() -> None:
    assert len(LINES) > 200
    assert {each.kind for each in LINES} >= {"INFO", "WARNING", "ERROR", "printed"}


def test_each_line_of_the_log_has_an_entry() -> None:
    missing = {each.text: f"{each.file}:{each.line}" for each in LINES if each.text not in log_lines.LINES}
    assert missing == {}, "say in docs/generate/log_lines.toml what each means, and what to do"


def test_each_entry_is_of_a_line_of_the_log() -> None:
    assert log_lines.LINES.keys() - {each.text for each in LINES} == set(), (
        "take it out of docs/generate/log_lines.toml"
    )


def test_files_that_log_what_they_are_given_are_known() -> None:
    found = {each.file for each in log_lines.lines() if log_lines.is_passed_on(each.text)}
    assert found == log_lines.PASSED_ON.keys(), "see [passed_on] in docs/generate/log_lines.toml"


@pytest.mark.parametrize("file", log_lines.COMPOSED)
def test_lines_that_are_put_together_elsewhere_are_there(file: str) -> None:
    found = texts_of(file)
    assert [text for text in log_lines.COMPOSED[file] if not any(text in each for each in found)] == []


def test_each_line_is_in_a_section() -> None:
    packages = {log_lines.package_of(file) for file in trees()}
    told = [package for group in log_lines.SUBJECTS.values() for package in group]
    assert packages - set(told) == {"__init__", "run", "demo"}
    assert len(told) == len(set(told))
    page = log_lines.page()
    assert all(literal(text) in page for text in log_lines.LINES)
