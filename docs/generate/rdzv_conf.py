"""The page of the keys of `--rdzv-conf`."""

from __future__ import annotations

from docs.generate.markdown import literal, table

from rallypoint.rendezvous.backends.option_table import OPTIONS, OptionText

HEAD = """\
# Keys of `--rdzv-conf`

`--rdzv-conf=key=value,key=value`, or `PET_RDZV_CONF`, sets options of the rendezvous. Blanks around keys and values do
not count; a value may contain `=` but no comma. An unknown key causes a warning and has no effect. Times are in
seconds. Yes is 1, true, t, yes or y; no is 0, false, f, no or n. All nodes must set the same values, except for
`is_host` and `listen`.

For a job of one node, started with `--standalone` or by default, the keys of `c10d` apply.
"""


def page() -> str:
    """The page, in Markdown."""
    both = (
        ("## Keys that torchrun has too", [option for option in OPTIONS if not option.beyond_torchrun]),
        ("## Keys beyond torchrun", [option for option in OPTIONS if option.beyond_torchrun]),
    )
    return "\n".join([HEAD, *(f"{title}\n\n{_table(options)}" for title, options in both)])


def _table(options: list[OptionText]) -> str:
    rows = [
        (literal(each.name), each.default, ", ".join(map(literal, each.backends)), each.meaning) for each in options
    ]
    return table(("key", "default", "backends", "meaning"), rows)
