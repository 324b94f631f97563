"""Every command in the documents runs, and what a page shows is what comes (rules: CONTRIBUTING.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests import without_compiler
from tests.documents.blocks import Page
from tests.documents.pages import NOT_YET, pages
from tests.documents.running import PageRun
from tests.jobs.launching import launching

MARKERS = {"torch": ["torch"]}


def _cases() -> list[object]:
    return [
        pytest.param(each, marks=[getattr(pytest.mark, name) for key in each.settings for name in MARKERS.get(key, ())])
        for each in pages()
        if each.runs and each.name not in NOT_YET
    ]


@pytest.mark.parametrize("page", _cases(), ids=lambda page: page.name.removesuffix(".md").replace("/", "-"))
def test_the_commands_of(page: Page, tmp_path: Path) -> None:
    env: dict[str, str] = {}
    if "torch" in page.settings:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("needs torch")
        env |= without_compiler.ENVIRONMENT
    with launching(tmp_path) as launcher:
        PageRun(page, launcher, env=env).run()
