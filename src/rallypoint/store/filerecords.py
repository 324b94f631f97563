"""The records in a FileStore's file (contract section 9.7). Pure.

The file only grows: each record is a key and its new value, both with a native u32 length before them. The latest
record of a key counts. A key that begins with a minus removes the key behind it.
"""

from __future__ import annotations

from struct import Struct

from rallypoint.store.errors import StoreProtocolError

REFCOUNT = b"refcount/"
"""How many have the file open now."""
CLEANUP = b"cleanup/"
"""How many have closed it."""

_LENGTH = Struct("=I")
_MAX_LENGTH = (1 << 32) - 1
_REMOVED = b"-"


def setting(key: bytes, value: bytes) -> bytes:
    """The record that sets a key. Raises StoreProtocolError if the value is longer than its length field can say."""
    if len(value) > _MAX_LENGTH:
        raise StoreProtocolError(
            f"a value of {len(value)} bytes is too long for a file; at most {_MAX_LENGTH} are allowed"
        )
    return _LENGTH.pack(len(key)) + key + _LENGTH.pack(len(value)) + value


def removing(key: bytes) -> bytes:
    """The record that removes a key."""
    return setting(_REMOVED + key, b"")


def replay(data: bytes, content: dict[bytes, bytes], size: int | None = None) -> int:
    """Do to `content` what the records say that are whole.

    Args:
        data: bytes of the file, from the beginning of a record on.
        content: keys and values.
        size: how many bytes the file has from there on; None for those of `data`.

    Returns:
        Where in `data` the first record begins that is not whole.

    Raises:
        StoreProtocolError: it is not a store's file, or does not end with a record's end.
    """
    size = len(data) if size is None else size
    at = 0
    while (found := _string(data, at, size)) is not None:
        key, middle = found
        if not key:
            raise StoreProtocolError("it holds a key without a name: it is not a store's file")
        found = _string(data, middle, size)
        if found is None:
            break
        value, at = found
        if key.startswith(_REMOVED):
            content.pop(key[1:], None)
        else:
            content[key] = value
    return at


def _string(data: bytes, at: int, size: int) -> tuple[bytes, int] | None:
    """The string that begins there and where it ends; None if that is not in `data`."""
    if at == size:
        return None
    start = at + _LENGTH.size
    if start <= len(data):
        end = start + _LENGTH.unpack_from(data, at)[0]
        if end <= len(data):
            return data[start:end], end
        start = end
    if start > size:
        raise StoreProtocolError("it ends within a record: it is not a store's file, or a writer died while writing")
    return None
