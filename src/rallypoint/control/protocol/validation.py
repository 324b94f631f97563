"""Checks messages from other machines beyond their types: ranges, lengths, finite numbers, printable text.

Each message is checked once, where it is decoded, so that later code does not have to. A field's name means the same in
every message, so rules go by name, with one rule for all other numbers and one for all other texts. A number out of
range is refused. Texts and times of day are never refused, since a failure must be reported whatever a program printed
or a clock shows: unprintable characters become question marks, and values that are too long or too large are cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint.control.protocol.ranges import MAX_LINE, MAX_NODES, NUMBERS, OTHER_NUMBERS, ROUNDS, NumberRange

if TYPE_CHECKING:
    import msgspec

_ADDRESS = re.compile(r"[0-9a-fA-F:.]{2,45}(/[0-9]{1,3})?")
"""Pattern of numeric addresses and networks. The code that uses a match checks whether it is valid."""

M = TypeVar("M")


_ROUND_NUMBER = NumberRange(-1, ROUNDS // 2)
_RESUME_NUMBERS: Mapping[str, NumberRange] = {
    **NUMBERS,
    "round": _ROUND_NUMBER,
    "last_ended_round": _ROUND_NUMBER,
    "failures": _ROUND_NUMBER,
}
"""Ranges in a `ResumeRequest`: a coordinator counts on from these numbers, and must still send numbers in range."""
_TIMES = NumberRange(0, 253402214400.0)
"""Epoch seconds up to the year 9999, which every time zone can show. Later times come from a wrong clock. They are cut,
because that machine's reports are needed too."""

_TEXTS: Mapping[str, int] = {
    "traceback": 32 * 1024,
    "message": 8 * 1024,
    "sentence": 8 * 1024,
    "detail": 8 * 1024,
    "report": 32 * 1024,
}
"""Maximum size of a multi-line text in bytes of UTF-8, by its field's name: all texts of one message, with its other
fields, fit into a frame."""
_LINES: Mapping[str, int] = {"host": 255, "domain": 255}
"""Maximum size of a one-line text; `MAX_LINE` for others."""
_MAX_BYTES = 256
_MAX_BYTES_OF: Mapping[str, int] = {"data": 48 * 1024}
"""Maximum size of a bytes field, by its name; `_MAX_BYTES` for others."""
_MAX_ITEMS_OF: Mapping[str, int] = {
    "addresses": 1000,
    "succeeded": 1000,
    "watching": 64,
    "figures": 64,
    "clues": 64,
    "remarks": 64,
}
"""Maximum number of items in a field, by its name; `_MAX_ITEMS` for others."""
_MAX_ITEMS = MAX_NODES


class ValidationError(ValueError):
    """A message contains an invalid number; the sentence names message, field, value and range."""


def decoded(decoder: msgspec.json.Decoder[M] | msgspec.msgpack.Decoder[M], data: bytes) -> M:
    """Decode data. Raises ValueError if it is something else or nested too deeply."""
    try:
        return decoder.decode(data)
    except RecursionError as error:  # msgspec's own errors are ValueErrors
        raise ValueError(str(error)) from None


def validated(message: M) -> M:
    """Check a message, and make its texts printable.

    Args:
        message: a `NamedTuple` whose fields have their declared types.

    Raises:
        ValidationError: a number is out of range, or an address is invalid.
    """
    record: Any = message
    kind = type(message)
    rules = _PLANS.get(kind) or _plan(kind)
    changed: dict[str, Any] = {}
    for value, (name, least, most, longest) in zip(record, rules, strict=True):
        # The fast path for nearly all values, at a third of the cost; anything unusual is checked below.
        of = type(value)
        if of is int or of is float:
            if least <= value <= most:
                continue
        elif of is str:
            if value.isascii() and value.isprintable() and len(value) <= longest:
                continue
        elif value is None or of is bool or (of is bytes and len(value) <= _MAX_BYTES):
            continue
        checked = _same(value) if name == "settings" else _value(value, name, record)
        if checked is not value:
            changed[name] = checked
    return record._replace(**changed) if changed else record  # type: ignore[no-any-return]


_PLANS: dict[type, tuple[tuple[str, float, float, int], ...]] = {}


def _plan(kind: Any) -> tuple[tuple[str, float, float, int], ...]:
    """Rules for a kind of record: the name, number range and text length of each field."""
    ranges = {**(_RESUME_NUMBERS if kind.__name__ == "ResumeRequest" else NUMBERS), "timestamp": _TIMES}
    _PLANS[kind] = plan = tuple(
        (name, *ranges.get(name, OTHER_NUMBERS), _TEXTS.get(name, _LINES.get(name, MAX_LINE))) for name in kind._fields
    )
    return plan


@lru_cache(maxsize=64)
def _same(settings: Any) -> Any:
    """Like `validated`, for values that all nodes of a job share."""
    return validated(settings)


def _value(value: Any, name: str, record: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and not hasattr(value, "name"):
        return _number(value, name, record)
    if type(value) is str:
        return _text(value, name)
    if isinstance(value, bytes):
        _count(value, _MAX_BYTES_OF.get(name, _MAX_BYTES), name, record)
        return value
    if hasattr(value, "_fields"):
        return validated(value)
    if isinstance(value, (tuple, list)):
        _count(value, _MAX_ITEMS_OF.get(name, _MAX_ITEMS), name, record)
        if name == "addresses":
            _check_addresses(value, record)
        return type(value)(_value(item, name, record) for item in value)
    return value  # a member of an enumeration


def _number(value: float, name: str, record: Any) -> float:
    if name == "timestamp":
        return min(max(value, _TIMES.minimum), _TIMES.maximum) if value == value else _TIMES.minimum
    rules = _RESUME_NUMBERS if type(record).__name__ == "ResumeRequest" else NUMBERS
    least, most = rules.get(name, OTHER_NUMBERS)
    if least <= value <= most:  # never true for NaN
        return value
    raise ValidationError(
        f"a {type(record).__name__} whose {name} is {value} is refused; it must be from {least} to {most}"
    )


def _check_addresses(values: Collection[str], record: Any) -> None:
    for address in values:
        if not _ADDRESS.fullmatch(address):
            raise ValidationError(
                f"a {type(record).__name__} with {_text(address[:64], '')!r} among its addresses is refused: this is "
                "not an address"
            )


def _count(value: Collection[Any], most: int, name: str, record: Any) -> None:
    if len(value) > most:
        raise ValidationError(
            f"a {type(record).__name__} whose {name} has {len(value)} parts is refused; the maximum is {most}"
        )


def _text(text: str, name: str) -> str:
    lines = name in _TEXTS
    most = _TEXTS[name] if lines else _LINES.get(name, MAX_LINE)
    if (text.isprintable() or (lines and _is_printable_lines(text))) and _size(text) <= most:
        return text
    printable = "".join(
        character if character.isprintable() or (lines and character in "\n\t") else "?" for character in text[:most]
    )
    return printable if _size(printable) <= most else printable.encode()[:most].decode(errors="ignore")


def _size(text: str) -> int:
    """The size of a printable text in bytes."""
    return len(text) if text.isascii() else len(text.encode())


def _is_printable_lines(text: str) -> bool:
    return text.replace("\n", "").replace("\t", "").isprintable()
