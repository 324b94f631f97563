"""Blocks that stand for a file are named on the site."""

from __future__ import annotations

from docs.file_names import with_file_names


def test_a_file_has_its_name_above_it() -> None:
    page = "Save this:\n\n<!-- file: train.py -->\n```python\nprint(1)\n```\n"
    assert with_file_names(page) == "Save this:\n\n```{code-block} python\n:caption: train.py\n\nprint(1)\n```\n"


def test_other_comments_and_blocks_stay() -> None:
    page = "<!-- file: a b.sh -->\n<!-- not run: no -->\n```bash\nls\n```\n\n<!-- exit: 1 -->\n```console\n$ ls\n```\n"
    named = with_file_names(page)
    assert named.startswith("<!-- not run: no -->\n```{code-block} bash\n:caption: a b.sh\n\nls\n```\n")
    assert named.endswith("<!-- exit: 1 -->\n```console\n$ ls\n```\n")
