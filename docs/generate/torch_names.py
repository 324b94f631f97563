"""The page of torch's modules and names in `rallypoint.compat`."""

from __future__ import annotations

from docs.generate.markdown import literal, table

from rallypoint import compat
from rallypoint.compat.names import ELSEWHERE, HOMES, MODULES

HEAD = """\
# Python: names of torch

`rallypoint.compat` contains the modules of `torch.distributed.launcher`, `torch.distributed.elastic` and their
neighbours under the same paths. To use them, change `torch.distributed` to `rallypoint.compat` in the import line
([how](../../how-to/torch-api.md)). Rallypoint implements the names below, in every module where torch has them,
without importing torch. PyTorch's documentation describes them, and [this page](../../contract/10-differences.md) lists
the differences. All other names and modules are torch's own.
"""


def page() -> str:
    """The page, in Markdown."""
    modules = ", ".join(literal(f"{compat.__name__}.{path}") for path in sorted(MODULES))
    held = {**{home: set(names.split()) for home, names in HOMES.items()}, compat.__name__: set(compat.__all__)}
    for (_, name), (home, _) in ELSEWHERE.items():
        held.setdefault(home, set()).add(name)
    rows = [(literal(home), ", ".join(map(literal, sorted(names)))) for home, names in sorted(held.items())]
    return f"{HEAD}\nModules: {modules}.\n\n" + table(("defined in", "names"), rows)
