"""`python -m docs.check [PAGE...]`: checks pages in seconds: links and names, the commands of the pages that have
changed since the last commit (or of those that are given), and the site, which is the preview.

Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from docs.repository_links import DOCS

ROOT = DOCS.parent
SITE = DOCS / "_build" / "html"


def main(pages: list[str]) -> int:
    """Check; 1 if anything is wrong."""
    pages = pages or changed_pages()
    print("pages:", ", ".join(pages) or "none has changed; only links, names and the site are checked")
    tests = [[f"{ROOT}/tests/unit/test_documents.py"]]
    names = [page.removesuffix(".md").replace("/", "-") for page in pages]
    if names:
        tests.append([f"{ROOT}/tests/documents/test_commands.py", "-k", " or ".join(f"[{name}]" for name in names)])
    # 5: no test was chosen, since a page has no commands.
    wrong = [each for each in tests if _pytest(each) not in (0, 5)]
    site = ["make", "--silent", "docs"]
    wrong += [site] if subprocess.run(site, cwd=ROOT, check=False).returncode else []
    for page in pages:
        if page.startswith("docs/"):
            print(f"preview: {(SITE / page.removeprefix('docs/')).with_suffix('.html').as_uri()}")
    return 1 if wrong else 0


def changed_pages() -> list[str]:
    """Pages that differ from the last commit, as paths from the root of the repository."""
    commands = (
        ["git", "diff", "--name-only", "HEAD", "--", "*.md"],
        ["git", "ls-files", "-o", "--exclude-standard", "*.md"],
    )
    listed = [subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True).stdout for each in commands]
    return sorted(page for page in "".join(listed).splitlines() if Path(ROOT, page).exists())


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
