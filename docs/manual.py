"""`python -m docs.manual [FOLDER]`: writes `rallyrun.1` and `rallyctl.1` below a folder, by default `build/share`.

Sphinx's builder of manual pages makes them from the pages of the reference, so that each text exists once.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from docs.generate import environment, flags, rallyctl, rdzv_conf
from docs.repository_links import DOCS, LINK

from rallypoint.base.version import __version__

SUMMARIES = {
    "rallyrun": "start distributed Python jobs and keep them alive",
    "rallyctl": "start, watch and control rallyrun jobs, and run services for them",
}


def sources() -> dict[str, str]:
    """The text of each page, in Markdown."""
    exit_codes, files = ((DOCS / "reference" / f"{name}.md").read_text() for name in ("exit-codes", "files-and-ports"))
    return {
        "rallyrun": _joined([flags.page(), rdzv_conf.page(), environment.page(), files, exit_codes]),
        "rallyctl": _joined([rallyctl.page(), environment.page()]),
    }


def write_manual(folder: Path) -> list[Path]:
    """Write the pages below a folder. They bear the date of `SOURCE_DATE_EPOCH`, else today's."""
    from sphinx.application import Sphinx

    target = folder / "man" / "man1"
    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    settings = {
        "extensions": ["myst_parser"],
        "root_doc": "rallyrun",
        "project": "Rallypoint",
        "release": __version__,
        "today": time.strftime("%Y-%m-%d", moment),
        "smartquotes": False,
        "man_pages": [(name, name, summary, "", 1) for name, summary in SUMMARIES.items()],
        "suppress_warnings": ["toc.not_included"],
    }
    with tempfile.TemporaryDirectory() as source:
        for name, text in sources().items():
            Path(source, f"{name}.md").write_text(text)
        Sphinx(
            source, None, str(target), f"{source}/.doctrees", "man", settings, status=None, warningiserror=True
        ).build()
    return [target / f"{name}.1" for name in SUMMARIES]


def _joined(pages: Iterable[str]) -> str:
    """Pages as sections of one, without links: their headings are one level lower."""
    first, *others = pages
    lower = [re.sub(r"(?m)^#", "##", each) for each in others]
    return LINK.sub(r"\g<text>", "\n\n".join([first, *lower]))


if __name__ == "__main__":
    for written in write_manual(Path(*sys.argv[1:2] or ["build/share"])):
        print(written)
