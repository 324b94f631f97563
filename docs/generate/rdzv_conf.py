"""The page of the keys of `--rdzv-conf`."""

from __future__ import annotations

from docs.generate.markdown import literal, table

from rallypoint.rendezvous.backends.option_table import OPTIONS, OptionText

HEAD = """\
# Keys of `--rdzv-conf`

Set options of the rendezvous with `--rdzv-conf=key=value,key=value` or `PET_RDZV_CONF`. Blanks around keys and values
are ignored. A value can contain `=` but no comma. Rallypoint warns about unknown keys and ignores them. Times are in
seconds. For yes, write 1, true, t, yes or y; for no, write 0, false, f, no or n. Set the same values on all nodes,
except for `is_host` and `listen`.

A job on one node, started with `--standalone` or by default, uses the keys of `c10d`.
"""


def page() -> str:
    """The page, in Markdown."""
    both = (
        ("## Keys that torchrun also has", [option for option in OPTIONS if not option.beyond_torchrun]),
        ("## Keys beyond torchrun", [option for option in OPTIONS if option.beyond_torchrun]),
    )
    return "\n".join([HEAD, *(f"{title}\n\n{_table(options)}" for title, options in both)])


def _table(options: list[OptionText]) -> str:
    rows = [
        (literal(each.name), each.default, ", ".join(map(literal, each.backends)), each.meaning) for each in options
    ]
    return table(("key", "default", "backends", "meaning"), rows)
