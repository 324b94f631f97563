"""Every command in the documents runs and prints what its page shows (rules: docs/commands-in-documents.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.documents.blocks import Page, page
from tests.documents.running import PageRun
from tests.documents.settings import SETTINGS, surroundings
from tests.jobs.launching import launching

ROOT = Path(__file__).parents[2]
_MADE = {"_build", "generated", "project"}
"""Folders below docs/ that are made from something else."""


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


def _cases() -> list[object]:
    return [
        pytest.param(
            each, marks=[getattr(pytest.mark, name) for key in each.settings for name in SETTINGS[key].markers]
        )
        for each in pages()
        if each.runs
    ]


@pytest.mark.parametrize("page", _cases(), ids=lambda page: page.name.removesuffix(".md").replace("/", "-"))
def test_the_commands_of(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with surroundings(page, tmp_path, request) as around, launching(tmp_path) as launcher:
        PageRun(page, launcher, around).run()
