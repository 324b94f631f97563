"""Pages made from something else: reference from the code's tables, and copies of documents outside `docs/`.

flags       every flag of `rallyrun`
rallyctl    every verb of `rallyctl` and its flags
rdzv_conf   the keys of `--rdzv-conf`
environment variables that Rallypoint reads and sets
torch_names names of torch in `rallypoint.compat`
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
"""Names of pages to the functions that make their Markdown."""


GENERATED = DOCS / "reference" / "generated"


def write_reference() -> None:
    """Write the pages of `REFERENCE`, which are in the repository so that links to them work there too."""
    _write(GENERATED, {f"{name}.md": page() for name, page in REFERENCE.items()})


def write_copies() -> None:
    """Write `project/`, which git ignores: the site's copies of documents outside `docs/`."""
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
