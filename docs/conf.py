"""How Sphinx builds the site of these pages: `make docs`. Why Sphinx: decision 43."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.generate import write_pages
from docs.repository_links import adapted

from rallypoint import __version__

project = "Rallypoint"
author = "The Rallypoint engineers"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nitpicky = True
smartquotes = False  # it makes a dash of the beginning of a flag
exclude_patterns = ["_build", "generate", "recording"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"Rallypoint {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False


def _read(app: Any, name: str, content: list[str]) -> None:
    content[0] = adapted(content[0], Path(app.env.doc2path(name)).resolve())


def setup(app: Any) -> None:
    """Writes the pages that are made from the code, and has links to files outside docs/ lead somewhere."""
    write_pages()
    app.connect("source-read", _read)
