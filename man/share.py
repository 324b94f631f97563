"""What an installation has below its `share/`: manual pages, and completion scripts where shells look for them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from man import pages
from rallypoint.base.version import __version__
from rallypoint.cli.completion.scripts import SHELLS, completion_script
from rallypoint.cli.parse import build_parser
from rallypoint.cli.rallyctl import build_parser as build_rallyctl


def shared_files() -> Mapping[str, str]:
    """Texts by their paths, which begin with `share/`.

    The pages bear the date of `SOURCE_DATE_EPOCH`, else today's.
    """
    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    date = time.strftime("%Y-%m-%d", moment)
    manual = {f"share/man/man1/{page.__name__}.1": page(date, __version__) for page in (pages.rallyrun, pages.rallyctl)}
    scripts = {
        path: completion_script(name, build_parser(), build_rallyctl())
        for name, shell in SHELLS.items()
        for path in shell.installed_as
    }
    return manual | scripts


def write_shared_files(folder: Path) -> Mapping[Path, str]:
    """Write all of them below a folder; returns where each lies, and its path in an installation."""
    written = {}
    for name, text in shared_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        written[path] = name
    return written
