"""Protocol buffers on the wire, as far as etcd's messages need them: numbers, byte strings and messages in messages.

Pure. A field that is zero or empty is left out, as proto3 does. The input may be anything: whatever is not a message
raises `DecodingError`, and unknown fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT = 10
"""Bytes of the longest varint, which carries 64 bits."""


class DecodingError(ValueError):
    """Bytes that are no message."""


def number(field: int, value: int) -> bytes:
    """A field with a number: a bool, an enum or an int64."""
    return _varint(field << 3 | _VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF) if value else b""


def string(field: int, value: bytes) -> bytes:
    """A field with bytes or text."""
    return message(field, value) if value else b""


def message(field: int, value: bytes) -> bytes:
    """A field with a message, which may be empty and is there all the same."""
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Each field of a message with its number, in the order of the wire. Fixed-width fields are skipped.

    Raises:
        DecodingError: this is no message.
    """
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            yield tag >> 3, _slice(data, at, size)
            at += size
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            _slice(data, at, size)
            at += size
        else:
            raise DecodingError(f"a field of the unknown kind {kind}")


class Fields:
    """The fields of one message, by number."""

    def __init__(self, data: bytes) -> None:
        self._found: dict[int, list[int | bytes]] = {}
        for field, value in fields(data):
            self._found.setdefault(field, []).append(value)

    def __contains__(self, field: int) -> bool:
        return field in self._found

    def number(self, field: int) -> int:
        """An int64, 0 if it is not there."""
        value = self._last(field, 0)
        if not isinstance(value, int):
            raise DecodingError(f"field {field} should be a number")
        return value - (1 << 64) if value >> 63 else value

    def string(self, field: int) -> bytes:
        """Bytes or a message, empty if it is not there."""
        value = self._last(field, b"")
        if not isinstance(value, bytes):
            raise DecodingError(f"field {field} should be bytes")
        return value

    def text(self, field: int) -> str:
        """Text, empty if it is not there."""
        return self.string(field).decode(errors="replace")

    def strings(self, field: int) -> Iterator[bytes]:
        """All of a repeated field with bytes or messages."""
        for value in self._found.get(field, ()):
            if not isinstance(value, bytes):
                raise DecodingError(f"field {field} should be bytes")
            yield value

    def _last(self, field: int, default: int | bytes) -> int | bytes:
        found = self._found.get(field)
        return found[-1] if found else default


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + index + 1
    raise DecodingError("a number without an end")


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise DecodingError(f"a field of {size} bytes where {len(data) - at} are left")
    return data[at : at + size]
