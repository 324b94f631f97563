"""Pages that are made each time the site is built: reference from the tables of the code, and the repository's papers.

flags       every flag of `rallyrun`
rallyctl    every verb of `rallyctl` and its flags
rdzv_conf   the keys of `--rdzv-conf`
environment environment variables, read and set
torch_names the names of torch that `rallypoint.compat` has
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import environment, flags, rallyctl, rdzv_conf, torch_names
from docs.repository_links import DOCS, PAPERS, copied

REFERENCE: dict[str, Callable[[], str]] = {
    "flags": flags.page,
    "rdzv-conf": rdzv_conf.page,
    "rallyctl": rallyctl.page,
    "environment": environment.page,
    "torch-names": torch_names.page,
}
"""Names of pages to what makes their text, in Markdown."""


def write_pages() -> None:
    """Writes `reference/generated/` and `project/`, which git ignores. Pages that have not changed stay untouched."""
    _write(DOCS / "reference" / "generated", {f"{name}.md": page() for name, page in REFERENCE.items()})
    _write(
        DOCS / "project", {page.name: copied(paper) for paper, page in PAPERS.items() if page.parent.name == "project"}
    )


def _write(folder: Path, pages: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
