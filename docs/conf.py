"""How Sphinx builds the site of these pages: `make docs`. Why Sphinx: decision 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.file_names import with_file_names
from docs.generate import write_copies
from docs.repository_links import adapted
from sphinx.util.nodes import make_refnode

from rallypoint import __version__

project = "Rallypoint"
author = "The Rallypoint engineers"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"collections\.abc\..*|(datetime\.)?timedelta|JsonObject|~?P|(rallypoint\.[a-z.]*\.)?[RS]")
]  # foreign, variables
default_role = "code"
smartquotes = False  # it makes a dash of the beginning of a flag
exclude_patterns = ["_build", "generate"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"Rallypoint {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False


def _read(app: Any, name: str, content: list[str]) -> None:
    content[0] = with_file_names(adapted(content[0], Path(app.env.doc2path(name)).resolve()))


def _keep_short_literals_whole(app: Any, tree: Any, _page: str) -> None:
    """A flag or a command of a few words is not broken between two lines; a sentence is."""
    for each in tree.findall(lambda node: node.tagname == "literal"):
        length = len(each.astext())
        each["classes"] += [name for name, most in (("short", 24), ("very-short", 12)) if length <= most]


def _named(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """A link to what an annotation names without its module, if that is on a page, and nothing else of that name."""
    names = env.get_domain("py").objects
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    found = [
        each for each in names if each.rpartition(".")[2] == name and names[each].objtype in ("class", "exception")
    ]
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    entry = names[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, shown, found[0])


def setup(app: Any) -> None:
    """Copy documents from outside docs/, and make links to other files of the repository work."""
    write_copies()
    app.connect("source-read", _read)
    app.connect("missing-reference", _named)
    app.connect("doctree-resolved", _keep_short_literals_whole)
