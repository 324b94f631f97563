"""One case: a command line as data, and the deliberate differences that it meets."""

from __future__ import annotations

import signal
import sys
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance.record import From

_BIN = Path(sys.executable).parent


class Side(Enum):
    """Whose launcher it is."""

    TORCH = "torchrun"
    OURS = "rallyrun"


class Entry(Enum):
    """How the launcher is called: torchrun's way and ours."""

    COMMAND = ([str(_BIN / "torchrun")], [str(_BIN / "rallyrun")])
    RUN = ([sys.executable, "-m", "torch.distributed.run"], [sys.executable, "-m", "rallypoint.run"])
    LAUNCH = ([sys.executable, "-m", "torch.distributed.launch"], [sys.executable, "-m", "rallypoint.launch"])

    def command(self, side: Side) -> list[str]:
        """The words before the flags."""
        return self.value[side is Side.OURS]


_OF_THE_TEST = ("name", "code", "differs", "machine", "since")
"""The fields on which torchrun's side does not depend."""


class Case(NamedTuple):
    """One command line, run under both launchers, where everything is compared that a run leaves.

    In all texts, `{port}` is a port that is free on the side that runs, and `{here}` the folder in which it runs; in
    flags, `{node}` is the number of the node.

    `name` starts with the contract's section. `program` is the text of the worker (a name of `workers`), which lies in
    `script.py`; `words` are what follows the flags, the script by default. `nodes` are the flags of each node beside
    those of all. None in `env` takes a variable away. `send` goes to the launchers once each node has printed `ups`
    lines. `code` is torchrun's exit code on the first node: two sides that fail alike for a mistake in the case would
    show nothing. `differs` names what of DIFFERENCES the case meets, and it must meet them all. `machine` says that
    torchrun's side depends on the machine, `since` which torchrun is the first that knows the flags.
    """

    name: str
    flags: str | tuple[str, ...] = ()
    program: str = ""
    words: tuple[str, ...] = ("script.py",)
    nodes: tuple[tuple[str, ...], ...] = ((),)
    env: tuple[tuple[str, str | None], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    entry: Entry = Entry.COMMAND
    send: signal.Signals | None = None
    ups: int = 1
    code: int = 0
    differs: tuple[str, ...] = ()
    machine: bool = False
    since: str = ""

    def flag_words(self) -> tuple[str, ...]:
        """The flags of all nodes, word by word."""
        return tuple(self.flags.split()) if isinstance(self.flags, str) else self.flags

    def question(self) -> dict[str, Any]:
        """All that torchrun's side depends on, as plain JSON."""
        told = {**self._asdict(), "entry": self.entry.name, "send": self.send and self.send.name}
        return {name: value for name, value in told.items() if name not in _OF_THE_TEST}

    def depends(self) -> From:
        """On what torchrun's side depends beside that; versions of Python differ in `--` and prefixes of flags."""
        if self.machine:
            return From.MACHINE
        return From.PYTHON if self.name.startswith("1.3 ") or "--" in self.words else From.TORCH
