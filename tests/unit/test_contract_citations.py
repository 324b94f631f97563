"""Each section of the contract that code, tests or pages cite is a heading in `docs/contract/`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "contract"

_NUMBER = r"\d+(?:\.\d+)?"
_NUMBERS = rf"{_NUMBER}(?:(?:, | and | to ){_NUMBER})*"
_CITATION = re.compile(
    rf"\b[Cc]ontract(?:'s)?(?: tables)? \(?(?:sections? )?({_NUMBERS})"
    rf"|\b[Ss]ections? ({_NUMBERS}) of the (?:\w+ )?contract"
)
"""`contract section 4.6`, `contract's sections 1 and 7.6`, `contract 5.10`, `section 4.3 of the contract`."""


def cited(text: str) -> Iterator[str]:
    """The sections that `text` cites, ends of lines and the marks of comments counted as spaces."""
    for found in _CITATION.finditer(re.sub(r"\s*\n[\s#*/]*", " ", text)):
        numbers = found[1] or found[2]
        yield from re.findall(_NUMBER, numbers)


def test_every_section_that_is_cited_exists() -> None:
    headings = [
        found[1]
        for page in sorted(PAGES.glob("[01]*.md"))
        for found in re.finditer(rf"(?m)^##? ({_NUMBER})\.? ", page.read_text())
    ]
    assert len(headings) == len(set(headings))
    files = [
        path
        for folder, suffixes in {
            "src": (".py", ".c", ".h"),
            "tests": (".py",),
            "docs": (".md",),
            "benchmarks": (".py", ".md"),
        }.items()
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and path != Path(__file__)
    ]
    citations = [(number, str(path.relative_to(ROOT))) for path in files for number in cited(path.read_text())]
    assert len(citations) > 100  # or the pattern has lost them
    assert [citation for citation in citations if citation[0] not in headings] == []


def test_the_cases_beside_torchrun_begin_with_a_section() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests/conformance/side_by_side").glob("cases_*.py"))
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    sections = set(re.findall(rf'Case\(\s*"({_NUMBER}) ', text))
    assert sections
    assert [section for section in sections if not re.search(rf"(?m)^##? {section}\.? ", pages)] == []
