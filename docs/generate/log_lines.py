"""The page of log lines."""

from __future__ import annotations

from pathlib import Path

from docs.generate.messages import Catalogue
from docs.generate.source import logged

HEAD = """\
# Log lines

The lines that agents, coordinators and `rallyctl` write to standard error, by subject. `…` stands for a value. A line
begins with its level (`E`, `W`, `I`), date, time, process and source line; `LOGLEVEL` sets the lowest level that is
written (default `WARNING`, `INFO` for each step). Lines marked as printed have no such prefix.

If this page does not say what to do, nothing needs to be done, or the line says it itself. Lines at `DEBUG` are for
developers of Rallypoint. Messages that end a command are [errors](errors.md).
"""

LINES = Catalogue(Path(__file__).with_suffix(".toml"), logged())


def page() -> str:
    """The page, in Markdown."""
    return f"{HEAD}\n" + LINES.sections()
