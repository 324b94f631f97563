"""Command-line flags as data: their rows, records of their values, and functions that read values.

This module does not use argparse, since programs that only launch import it too.
"""

from __future__ import annotations

from rallypoint.base.errors import UsageError
from rallypoint.base.light_typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NoReturn,
    Self,
    TypeVar,
    overload,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_DAY = 24 * 3600

SWITCH = None
"""The `read` of a flag without a value."""

T = TypeVar("T")


class Flag(Generic[T]):
    """One row: a flag, and the field of an `OptionRecord` with its value.

    The flag is named after the field: `--nproc-per-node` after `nproc_per_node`. `read` converts the text of a value
    (or raises UsageError); `SWITCH` marks a flag without a value. `metavar` stands for the value on the help page.
    `choices` apply to the command line only, not to the environment. `samples` are two valid texts, the first not the
    default; `bad` are invalid ones. `complete` lists words that complete a value.
    """

    def __init__(
        self,
        read: Callable[[str], T] | None,
        help: str,
        default: T,
        metavar: str = "",
        short: str = "",
        choices: tuple[str, ...] | None = None,
        from_environment: bool = True,
        samples: tuple[str, ...] = ("7", "3"),
        bad: tuple[str, ...] = (),
        complete: tuple[str, ...] | Callable[[], tuple[str, ...]] | None = None,
    ) -> None:
        self.read, self.help, self.default = read, help, default
        self.metavar, self.short, self.choices = metavar, short, choices
        self.from_environment, self.complete = from_environment, complete
        self.samples, self.bad = samples, bad

    def __set_name__(self, owner: type, name: str) -> None:
        self.dest = name
        """The name of the field: `nproc_per_node`."""

    @overload
    def __get__(self, record: None, owner: type) -> Flag[T]: ...
    @overload
    def __get__(self, record: OptionRecord, owner: type) -> T: ...
    def __get__(self, record: OptionRecord | None, owner: type) -> Flag[T] | T:
        return self if record is None else self.default

    @property
    def name(self) -> str:
        """The long spelling with dashes."""
        return f"--{self.dest.replace('_', '-')}"

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.short, self.name, f"--{self.dest}"))))

    @property
    def variable(self) -> str:
        """The environment variable for the flag: `PET_NPROC_PER_NODE`."""
        return f"PET_{self.dest.upper()}"

    @property
    def words(self) -> tuple[str, ...]:
        return self.read.words if isinstance(self.read, OneOf) else self.choices or ()


class OptionRecord:
    """Immutable values of options, by the names of its class's flags.

    Args:
        values: the values that differ from their flags' defaults.

    Raises:
        TypeError: an option is unknown.
    """

    flags: ClassVar[tuple[Flag[Any], ...]] = ()
    """All flags, the inherited ones first."""

    def __init_subclass__(cls) -> None:
        own = [row for row in vars(cls).values() if isinstance(row, Flag)]
        cls.flags = (*[flag for base in cls.__bases__ for flag in getattr(base, "flags", ())], *own)

    def __init__(self, **values: Any) -> None:
        known = {flag.dest: flag.default for flag in self.flags}
        if unknown := values.keys() - known.keys():
            raise TypeError(f"unknown option {min(unknown)!r}")
        vars(self).update(known | values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name!r} of {type(self).__name__} cannot be changed; create a new record with replace()")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def replace(self, **changes: Any) -> Self:
        """Copy with other values. Raises TypeError for an unknown option."""
        return type(self)(**vars(self) | changes)


class OneOf:
    """Reader that accepts one of several words, also in the environment (unlike `Flag.choices`).

    Args:
        words: the accepted values. An empty text among them stands for no value.
    """

    def __init__(self, *words: str) -> None:
        self.words = tuple(filter(None, words))
        self._accepted = words

    def __call__(self, text: str) -> str:
        if text not in self._accepted:
            *others, last = self.words
            which = f"neither {others[0]} nor" if len(others) == 1 else f"not one of {', '.join(others)},"
            raise UsageError(f"{text!r} is {which} {last}")
        return text


# Readers. The reference shows the first sentence of each docstring as the value's description.


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number; use one such as 3") from None


def restarts(text: str) -> int:
    """A whole number, or `N/TIME`, such as 3/1h."""
    if "/" not in text:
        return whole_number(text)
    from rallypoint.base.restart_budget import read_budget

    return read_budget(text)


def count(text: str) -> int:
    """A whole number, 0 or more."""
    value = whole_number(text)
    if value < 0:
        raise UsageError(f"{text!r} is out of range; use 0 or more")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number; use one such as 0.5") from None


def split_filters(text: str) -> tuple[str, ...]:
    """Texts, separated by commas. Two commas in a row are one comma of a text (contract section 6.6)."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def seconds(text: str) -> float:
    """Seconds from 0 to 3600."""
    value = number(text)
    if not 0 <= value <= 3600:
        raise UsageError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value


def duration(text: str) -> float:
    """Seconds above 0, up to a day."""
    value = number(text)
    if not 0 < value <= _DAY:
        raise UsageError(f"{text!r} is not a number of seconds above 0 and up to {_DAY}")
    return value


def timeout(text: str) -> float:
    """Seconds from 0 to a day."""
    value = number(text)
    if not 0 <= value <= _DAY:
        raise UsageError(f"{text!r} is not a number of seconds from 0 to {_DAY}")
    return value


def shell_command(text: str) -> str:
    """A command for the shell. None in an empty text."""
    if text and not text.strip():
        raise UsageError(f"{text!r} is not a command; use one such as 'dcgmi diag -r 1'")
    return text


def module_names(text: str) -> tuple[str, ...]:
    """Module names, separated by commas. None in an empty text."""
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            where = f" in {text!r}" if name != text else ""
            raise UsageError(f"{name!r}{where} is not a module name; use one such as torch or torch.distributed")
    return names


def signal_names() -> tuple[str, ...]:
    import signal

    names = (member.name for member in signal.Signals if member not in (signal.SIGKILL, signal.SIGSTOP))
    return tuple(names)
