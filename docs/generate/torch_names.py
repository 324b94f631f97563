"""The page of the names that `rallypoint.compat` has of torch's, module by module."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from docs.generate.markdown import literal, table

HEAD = """\
# Python: names of torch

`rallypoint.compat` has the public names of `torch.distributed.launcher`, `torch.distributed.elastic` and of the
modules beside them, under the same paths: change `torch.distributed` to `rallypoint.compat` in the import line
([how](../../how-to/torch-api.md)). None of it imports torch. PyTorch's documentation describes what they do,
[the list of differences](../../contract/10-differences.md) what differs. Names that torch's modules have only
because they import them exist too, but are not listed.
"""


def modules() -> dict[str, tuple[str, ...]]:
    """Modules of `rallypoint.compat` that have public names, to these."""
    compat = import_module("rallypoint.compat")
    names = sorted(each.name for each in pkgutil.walk_packages(compat.__path__, "rallypoint.compat."))
    found = {name: tuple(sorted(getattr(import_module(name), "__all__", ()))) for name in names}
    return {name: public for name, public in found.items() if public and name != "rallypoint.compat.reexports"}


def page() -> str:
    """The page, in Markdown."""
    rows = [(literal(name), ", ".join(map(literal, public))) for name, public in modules().items()]
    return f"{HEAD}\n" + table(("module", "names"), rows)
