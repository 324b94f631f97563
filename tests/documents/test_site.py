"""The site of the documents builds without a warning, with every page in its navigation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs.generate import REFERENCE
from docs.repository_links import PAPERS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(600)  # on a busy machine, Sphinx takes minutes


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it. Sphinx takes dead links and pages outside the navigation for errors."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return target


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    assert len(pages) > 70
    built = [site / page.relative_to(ROOT / "docs").with_suffix(".html") for page in pages]
    assert [page for page in built if not page.exists()] == []


def test_papers_of_the_repository_and_pages_made_from_its_code_are_on_the_site(site: Path) -> None:
    made = [site / "reference" / "generated" / f"{name}.html" for name in REFERENCE]
    papers = [
        site / page.parent.name / f"{page.stem}.html" for page in PAPERS.values() if page.parent.name == "project"
    ]
    assert len(papers) > 3
    assert [page for page in [*made, *papers] if not page.exists()] == []
