"""Each line that is logged and each error has an entry in the reference, and each entry is of one that is there."""

from __future__ import annotations

import pytest
from docs.generate.errors import ERRORS
from docs.generate.log_lines import LINES
from docs.generate.markdown import literal
from docs.generate.messages import SUBJECTS, Catalogue, package_of
from docs.generate.source import texts_of, trees

PAGES = [pytest.param(LINES, id="log_lines"), pytest.param(ERRORS, id="errors")]


def test_texts_are_found() -> None:
    assert len(LINES.said) > 200
    assert {each.kind for each in LINES.said} >= {"INFO", "WARNING", "ERROR", "printed"}
    assert len(ERRORS.said) > 300
    assert {each.kind for each in ERRORS.said} >= {"UserError", "UsageError", "RendezvousTimeoutError"}


@pytest.mark.parametrize("page", PAGES)
def test_each_text_has_an_entry(page: Catalogue) -> None:
    missing = {each.text: f"{each.file}:{each.line}" for each in page.said if each.text not in page.texts}
    assert missing == {}, "say what each means, and what to do, in [texts] of log_lines.toml or errors.toml"


@pytest.mark.parametrize("page", PAGES)
def test_each_entry_is_of_a_text(page: Catalogue) -> None:
    gone = page.texts.keys() - {each.text for each in page.said}
    assert gone == set(), "take these out of docs/generate/log_lines.toml or errors.toml"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_use_what_they_are_given_are_known(page: Catalogue) -> None:
    assert page.passing == page.passed_on.keys(), "see [passed_on] in docs/generate/log_lines.toml or errors.toml"


@pytest.mark.parametrize(("page", "file"), [(page, file) for page in (LINES, ERRORS) for file in page.composed])
def test_texts_that_are_put_together_elsewhere_are_there(page: Catalogue, file: str) -> None:
    found = texts_of(file)
    assert [text for text in page.composed[file] if not any(text in each for each in found)] == []


def test_each_package_has_a_section() -> None:
    told = [package for group in SUBJECTS.values() for package in group]
    assert {package_of(file) for file in trees()} - set(told) == {"__init__", "run", "demo"}
    assert len(told) == len(set(told))


@pytest.mark.parametrize("page", PAGES)
def test_each_entry_is_shown_with_its_meaning(page: Catalogue) -> None:
    shown = page.sections()
    assert [text for text, (meaning, *_) in page.texts.items() if f"\n- {literal(text)} (" not in f"\n{shown}"] == []
    assert [text for text, (meaning, *_) in page.texts.items() if meaning not in shown or not meaning] == []
