"""The pages keep to the rules that let a test run all their commands."""

from __future__ import annotations

import re

import pytest

from tests.documents.blocks import problems
from tests.documents.pages import ROOT, pages, text
from tests.documents.settings import SETTINGS

MOST_NOT_RUN = 24
"""Blocks that may be left out, each with its reason."""


def test_no_command_is_overlooked() -> None:
    found = [problem for page in pages() for problem in problems(page, text(page.name))]
    assert found == []


def test_what_pages_need_is_known() -> None:
    assert {need for page in pages() for need in page.settings} <= set(SETTINGS)


def test_what_is_run_on_another_page_is_run_there() -> None:
    by_name = {page.name: page for page in pages()}
    for page in pages():
        for block in page.blocks:
            if (elsewhere := block.says.get("run in")) is not None:
                run = [each.lines for each in by_name[elsewhere].blocks if each.is_run]
                assert block.lines in run, f"{page.name}:{block.line}: no block of {elsewhere} is the same"


def test_blocks_that_are_not_run_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = [
        f"{page.name}:{block.line}: {block.says['not run']}"
        for page in pages()
        for block in page.blocks
        if "not run" in block.says
    ]
    with capsys.disabled():
        print(f"\n{len(left_out)} blocks of the documents are not run:", *left_out, sep="\n  ")
    assert len(left_out) <= MOST_NOT_RUN


def test_what_checks_a_block_that_is_not_run_is_there() -> None:
    reasons = " ".join(block.says.get("not run", "") for page in pages() for block in page.blocks)
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    files, functions = (
        set(re.findall(r"tests/[\w/]+\.py", reasons)),
        set(re.findall(r"(?<![/\w])test_\w+\b(?!\.py)", reasons)),
    )
    assert files
    assert functions
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [name for name in functions if f"def {name}(" not in source] == []
