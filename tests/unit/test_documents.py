"""What the documents link to is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if not re.match(r"[a-z]+:", link)
    ]
    assert len(links) > 50
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_the_source_archive_holds_the_papers() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    included = text[text.index("[tool.hatch.build.targets.sdist]") :].partition("]\n")[2].partition("\n\n")[0]
    papers = ["LICENSE", *(page.name for page in ROOT.glob("*.md"))]
    assert [name for name in papers if f'"/{name}"' not in included] == []
