"""Links of the pages to files of the repository outside `docs/`.

On a code host they are relative paths, like all links. On the site, `PAPERS` have a page of their own, other files are
downloads (MyST does that), and a folder is a name without a link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent

PAPERS = {
    "README.md": DOCS / "index.md",
    "CHANGELOG.md": DOCS / "project" / "changelog.md",
    "CONTRIBUTING.md": DOCS / "project" / "contributing.md",
    "SECURITY.md": DOCS / "project" / "security-policy.md",
    "deploy/README.md": DOCS / "project" / "deploy.md",
    "benchmarks/README.md": DOCS / "project" / "benchmarks.md",
    "tests/README.md": DOCS / "project" / "tests.md",
}
"""Documents outside `docs/` to their pages on the site; those in project/ are copies."""

LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\]\[]|\[[^\]]*\])*)\]\((?P<target>[^)\s#]+)(?P<section>#[^)\s]*)?\)")


def copied(paper: str) -> str:
    """A document outside `docs/` as a page of the site: the same text, with links that work from there.

    Args:
        paper: its path from the repository's root, one of `PAPERS`.
    """
    page = PAPERS[paper]
    folder = (ROOT / paper).parent
    return _with_links((ROOT / paper).read_text(), lambda target: os.path.relpath(folder / target, page.parent))


def adapted(text: str, page: Path) -> str:
    """A page with its links changed to targets on the site.

    Args:
        text: the page, in Markdown.
        page: its path, below `docs/`.
    """
    return _with_links(text, lambda target: _on_the_site(target, page.parent))


def _with_links(text: str, changed: Callable[[str], str | None]) -> str:
    """The text with the target of each relative link changed; without the link where there is no target."""

    def link(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match["target"]):
            return match[0]
        target = changed(match["target"])
        return (
            match["text"] if target is None else f"{match['image']}[{match['text']}]({target}{match['section'] or ''})"
        )

    return LINK.sub(link, text)


def _on_the_site(target: str, folder: Path) -> str | None:
    path = Path(os.path.normpath(folder / target))
    if path.is_relative_to(DOCS) or not path.is_relative_to(ROOT):
        return target
    page = PAPERS.get(path.relative_to(ROOT).as_posix())
    if page is not None:
        return os.path.relpath(page, folder)
    return None if path.is_dir() else target
