"""Which worker commands can be forked from a zygote. Pure, except for a look at the program and the script.

python [flags] script [arguments]
python [flags] -m module [arguments]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

_FLAGS = frozenset("bBdOPqsuvR")
"""Flags of an interpreter without a value, under which a worker can be forked."""
_FLAGS_WITH_VALUE = frozenset("WX")
_REFUSED = {
    "c": "-c gives a command, and only scripts and modules are forked",
    "E": "-E has the interpreter ignore PYTHONPATH, by which a zygote is held",
    "I": "-I has the interpreter ignore PYTHONPATH, by which a zygote is held",
    "S": "-S leaves out `site`, in which a zygote is held",
}


class NotForkable(Exception):
    """The reason why workers start without preloading, as text.

    Args:
        text: the reason.
        about: its subject, if it is logged only once although the text may differ the next time.
    """

    def __init__(self, text: str, about: str = "") -> None:
        super().__init__(text)
        self.about = about or text


class NeverForkable(NotForkable):
    """The reason why a worker that the zygote was not made for is not forked, nor the next one like it."""


class PreloadCommand(NamedTuple):
    """The common part of the commands of all workers: the interpreter with its flags, and `-m` or a script."""

    interpreter: tuple[str, ...]
    is_module: bool
    target: str
    length: int
    """The number of its words; the rest are the script's own."""

    @property
    def path0(self) -> str:
        """The entry that the interpreter puts first on `sys.path` for it."""
        if self.is_module:
            return os.getcwd()
        if os.path.isdir(self.target) or self.target.endswith((".zip", ".pyz")):
            return self.target
        return os.path.dirname(os.path.realpath(self.target))

    @property
    def main_file(self) -> str | None:
        """The future value of `__main__.__file__`, if that is known before it runs."""
        return None if self.is_module or os.path.isdir(self.target) else os.path.join(os.getcwd(), self.target)


def parse_command(argv: Sequence[str]) -> PreloadCommand:
    """Split a command into its parts.

    Raises:
        NotForkable: its workers cannot be forked.
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        for place, letter in enumerate(argv[at][1:], 1):
            rest = argv[at][place + 1 :]
            if letter == "m":
                target = rest or "".join(argv[at + 1 : at + 2])
                flags = (f"-{argv[at][1:place]}",) if place > 1 else ()
                return _checked(PreloadCommand((*argv[:at], *flags), True, target, at + (1 if rest else 2)))
            if letter in _FLAGS_WITH_VALUE:
                at += not rest
                break
            if letter not in _FLAGS:
                raise NotForkable(
                    _REFUSED.get(letter, f"{argv[at]} is a flag of the interpreter that forks cannot have")
                )
        at += 1
    if at >= len(argv) or argv[at] == "-":
        raise NotForkable("the interpreter is given no script")
    return _checked(PreloadCommand(tuple(argv[:at]), False, argv[at], at + 1))


def _checked(command: PreloadCommand) -> PreloadCommand:
    if not command.target:
        raise NotForkable("the interpreter is given no module")
    if not command.is_module and not os.path.exists(command.target):
        raise NotForkable(f"there is no script {command.target!r}")
    program = command.interpreter[0]
    if not _is_interpreter(program):
        raise NotForkable(
            f"{program!r} is no Python interpreter itself, so what it would do with a zygote is not known"
        )
    return command


def _is_interpreter(program: str) -> bool:
    """Whether this is an interpreter's own file: a wrapper may change the environment that a zygote needs."""
    folders = [""] if os.path.dirname(program) else os.get_exec_path()
    path = next((each for each in (os.path.join(folder, program) for folder in folders) if os.path.isfile(each)), "")
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                return False
        return os.path.basename(path).startswith("python") or os.path.samefile(path, sys.executable)
    except OSError:
        return False
