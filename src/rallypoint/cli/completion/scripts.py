"""The completion scripts of all shells."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rallypoint.cli.command_table import Command, read_command, read_verbs
from rallypoint.cli.completion.bash_tables import bash_tables
from rallypoint.cli.completion.fish_tables import fish_tables
from rallypoint.cli.completion.zsh_tables import zsh_tables


class Shell(NamedTuple):
    """A shell: the function that makes its tables, and where it finds the script of a command, below a prefix."""

    tables: Callable[[Command, Sequence[Command]], str]
    installed_as: tuple[str, ...]


SHELLS = {
    "bash": Shell(
        bash_tables,
        tuple(f"share/bash-completion/completions/{name}" for name in ("rallyrun", "rallyctl")),
    ),
    "zsh": Shell(zsh_tables, ("share/zsh/site-functions/_rallyrun",)),
    "fish": Shell(
        fish_tables, tuple(f"share/fish/vendor_completions.d/{name}.fish" for name in ("rallyrun", "rallyctl"))
    ),
}
"""By name."""


def completion_script(shell: str, rallyrun: ArgumentParser, rallyctl: ArgumentParser) -> str:
    """The script for both commands.

    Args:
        shell: one of `SHELLS`.
        rallyrun: the parser of that command.
        rallyctl: the parser of that command.
    """
    template = Path(__file__).with_name(f"template.{shell}").read_text("utf-8")
    tables = SHELLS[shell].tables(read_command(rallyrun, "rallyrun"), read_verbs(rallyctl, "rallyctl"))
    return template.replace("#TABLES", tables, 1)
