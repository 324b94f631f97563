"""Every command in the documents runs, and what a page shows is what comes (rules: CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.blocks import Page
from tests.documents.pages import pages
from tests.documents.running import PageRun
from tests.documents.settings import SETTINGS, surroundings
from tests.jobs.launching import launching


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
