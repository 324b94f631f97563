"""The pages of the documents that hold commands."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.documents.blocks import Page, page

ROOT = Path(__file__).parents[2]
_MADE = {"_build", "generated", "project"}
"""Folders below docs/ that are made from something else, and that git ignores."""


@cache
def pages() -> tuple[Page, ...]:
    """All of them, in the order of their names; the decisions and the contract as well."""
    found = [path for path in (ROOT / "docs").rglob("*.md") if not _MADE & set(path.relative_to(ROOT).parts)]
    found += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")]
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return tuple(page(name, text(name)) for name in names)


def text(name: str) -> str:
    """A page, as it stands in the repository."""
    return (ROOT / name).read_text()
