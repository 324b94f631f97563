"""The page of log lines."""

from __future__ import annotations

from pathlib import Path

from docs.generate.messages import Catalogue
from docs.generate.source import logged

HEAD = """\
# Log lines

What agents, coordinators and `rallyctl` write to standard error, by subject. `…` stands for a value. A line begins
with its level (`E`, `W`, `I`), date, time, process and source line; `LOGLEVEL` says from which level on lines are
written (default `WARNING`, `INFO` for each step). Lines that are called printed have no such beginning.

Where nothing is said of what to do, nothing has to be done, or the line says it itself. Lines at `DEBUG` are for
those who work on Rallypoint. Sentences that end a command are [errors](errors.md).
"""

LINES = Catalogue(Path(__file__).with_suffix(".toml"), logged())


def page() -> str:
    """The page, in Markdown."""
    return f"{HEAD}\n" + LINES.sections()
