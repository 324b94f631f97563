"""The site of the documents builds without a warning, with every page in its navigation; so do the manual pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from docs.generate import REFERENCE
from docs.generate.rallyctl import verbs
from docs.manual import write_manual
from docs.repository_links import PAPERS
from hatch_build import BuildNative
from hatchling.metadata.core import ProjectMetadata

from rallypoint.cli.completion import SHELLS
from rallypoint.cli.flags import FLAGS
from tests.processes import completed

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(600)  # on a busy machine, Sphinx takes minutes


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it. Sphinx takes dead links and pages outside the navigation for errors."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(target)]
    done = completed(command, cwd=ROOT, timeout=540)
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


# Manual pages have each flag and verb, and nothing of the machine that made them; a wheel has them and the scripts


def test_the_pages_have_all_flags_and_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    rallyrun, rallyctl = (path.read_text() for path in write_manual(tmp_path))
    shown = rallyrun.replace("\\-", "-")
    assert [flag.name for flag in FLAGS if f".SS \\fB{flag.name}\\fP\n" not in shown] == []
    assert [flag.variable for flag in FLAGS if flag.from_environment and flag.variable not in shown] == []
    assert [verb for verb in verbs() if f".SH rallyctl {verb}\n".upper() not in rallyctl.upper()] == []
    for page in (rallyrun, rallyctl):
        assert "2001" in page
        assert sys.executable not in page
        assert str(ROOT) not in page


def test_a_wheel_has_scripts_and_an_editable_install_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RALLYPOINT_BUILD", "pure")
    monkeypatch.setattr(sys, "path", [*sys.path])
    shared, included = _build("standard", tmp_path)
    assert {path for paths in SHELLS.values() for path in paths} <= shared
    assert included == {f"rallypoint/cli/completions/{shell}" for shell in SHELLS}
    assert _build("editable", tmp_path) == (set(), set())


def _build(version: str, folder: Path) -> tuple[set[str], set[str]]:
    """Where in a wheel what the hook has written is put; afterwards it is gone, but for manual pages."""
    given: dict[str, Any] = {"shared_data": {}, "force_include": {}}
    hook = BuildNative(str(ROOT), {}, None, ProjectMetadata(str(ROOT), None), str(folder), "wheel")
    hook.initialize(version, given)
    assert all(Path(path).stat().st_size for path in (*given["shared_data"], *given["force_include"]))
    hook.finalize(version, given, "")
    written = [path for path in (*given["shared_data"], *given["force_include"]) if not path.endswith(".1")]
    assert [path for path in written if Path(path).exists()] == []
    return {*given["shared_data"].values()}, {*given["force_include"].values()}
