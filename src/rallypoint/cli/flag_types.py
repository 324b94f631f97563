"""The rows of the table of flags, and the readers of values (contract section 1.1)."""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

from rallypoint.base.light_typing import Any, NamedTuple

_DAY = 24 * 3600

SWITCH = None
"""The `read` of a flag that takes no value."""


class Flag(NamedTuple):
    """One row.

    `name` is the dashed long spelling; `read` converts the text of a value (ArgumentTypeError if it cannot) and is
    `SWITCH` for a flag without a value; `metavar` stands for the value on the help page; `choices` apply to the command
    line only, never to the environment.
    """

    name: str
    read: Callable[[str], object] | None
    default: object
    help: str
    metavar: str = ""
    short: str = ""
    choices: tuple[str, ...] | None = None
    from_environment: bool = True

    @property
    def dest(self) -> str:
        """The name of the value: `nproc_per_node` for `--nproc-per-node`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All ways to write it: short, dashed and underscored, each once."""
        return tuple(dict.fromkeys(filter(None, (self.short, self.name, f"--{self.dest}"))))

    @property
    def variable(self) -> str:
        """The environment variable that may give it: `PET_NPROC_PER_NODE`."""
        return f"PET_{self.dest.upper()}"


class FlagGroup(NamedTuple):
    """A section of the help page, with an example of its flags, and whether torchrun has none of them."""

    title: str
    example: str
    flags: tuple[Flag, ...]
    beyond_torchrun: bool = False


class ShowVersion(Action):
    """The flag `--version`: prints the command's name and the version to stdout and exits with code 0."""

    def __init__(self, option_strings: list[str], dest: str, command: str, default: str = SUPPRESS) -> None:
        super().__init__(option_strings, SUPPRESS, nargs=0, default=default, help="Show the version and exit")
        self._command = command

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        from rallypoint.base.version import __version__  # one module less at every start

        print(self._command, __version__)
        parser.exit()


class OneOf:
    """Reads one of some words. Unlike `Flag.choices`, they hold for the environment too.

    Args:
        words: the accepted values; the empty text, if it is among them, stands for none of the others.
    """

    def __init__(self, *words: str) -> None:
        self.words = tuple(filter(None, words))
        self._accepted = words

    def __call__(self, text: str) -> str:
        if text not in self._accepted:
            which = f"neither {self.words[0]} nor" if len(self.words) == 2 else f"none of {', '.join(self.words[:-1])},"
            raise ArgumentTypeError(f"{text!r} is {which} {self.words[-1]}")
        return text


def whole_number(text: str) -> int:
    """Read a whole number, as `int` does."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number, such as 3") from None


def number(text: str) -> float:
    """Read a number, as `float` does."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number, such as 0.5") from None


def split_filters(text: str) -> tuple[str, ...]:
    """Read comma-separated texts; two commas in a row are one comma of a text (contract section 6.6)."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def module_names(text: str) -> tuple[str, ...]:
    """Read comma-separated names of modules; none in an empty text."""
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            where = f" in {text!r}" if name != text else ""
            raise ArgumentTypeError(f"{name!r}{where} is not the name of a module, such as torch or torch.distributed")
    return names


def store_peers(text: str) -> str:
    """Read the peers that may connect to worker stores."""
    from rallypoint.base.errors import UserError
    from rallypoint.coordinator.store_peers import parse_policy

    try:
        parse_policy(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def worker_env(text: str) -> tuple[str, ...]:
    """Read comma-separated kinds of variables; torch's alone come to none."""
    from rallypoint.agent.features.worker_env import checked
    from rallypoint.base.errors import UserError

    try:
        return checked([part.strip() for part in text.split(",")])
    except UserError as error:
        raise ArgumentTypeError(f"{text!r} is not a list of kinds: {error}") from None


def socket_ifname(text: str) -> str:
    """Read which network interface workers use."""
    from rallypoint.agent.features.socket_ifname import checked
    from rallypoint.base.errors import UserError

    try:
        return checked(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """Read seconds, 0 for never."""
    value = number(text)
    if not 0 <= value <= 3600:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value


def duration(text: str) -> float:
    """Read a time in seconds that something may take."""
    value = number(text)
    if not 0 < value <= _DAY:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0, {_DAY} at most")
    return value


def timeout(text: str) -> float:
    """Read a time in seconds after which something counts as failed, 0 for never."""
    value = number(text)
    if not 0 <= value <= _DAY:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_DAY}")
    return value


def shell_command(text: str) -> str:
    """Read a command for the shell; none in an empty text."""
    if text and not text.strip():
        raise ArgumentTypeError(f"{text!r} is not a command, such as 'dcgmi diag -r 1'")
    return text
