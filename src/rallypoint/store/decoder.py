"""Reads a client's bytes into requests: incremental, bounded and quick.

Pure. `feed` takes what has arrived, however it was split; `next` gives one whole request at a time, made into what
the `Makers` say: a table's commands execute it at once, which saves a third of the time that a request
costs in Python. Laws:

- nothing is kept but the bytes that arrived, and nothing is allocated because a length says so: a length beyond the
  limits is refused as soon as it has been read;
- a field that is still incomplete is not looked at again before as many bytes have come as it lacks, so the work is
  linear in the bytes, whatever their split;
- MULTI_SET comes out as one SET for each pair, as soon as the pair is whole (contract section 9.3), and only without
  any pairs as itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import Generic, TypeAlias, TypeVar

from rallypoint.store.refusals import Reason, refusal
from rallypoint.store.wire import FIELDS, I64, MAGIC, MAX_KEY, MAX_KEYS, MAX_PAYLOAD, U32, U64, Op, check

R = TypeVar("R")

_u32 = U32.unpack_from
_u64 = U64.unpack_from
_i64 = I64.unpack_from
_u64_u64 = Struct("<QQ").unpack_from

Makers: TypeAlias = Mapping[Op, Callable[..., R]]
"""What to make of each request: functions that take the decoder's client and the request's fields, in order."""


class Decoder(Generic[R]):
    """The requests in one connection's bytes, which must begin with VALIDATE.

    Args:
        readers: what to make of requests; one for all decoders that make the same.
        client: handed to the makers with each request.
    """

    __slots__ = (
        *("_at", "_client", "_consumed", "_data", "_held_back", "_keys", "_known"),
        *("_left", "_limit", "_make", "_many_pairs", "_needed", "_readers"),
    )

    def __init__(self, readers: OpcodeReaders[R], client: object = None) -> None:
        self._client = client
        self._readers = readers.before_validate
        self._known = readers.requests
        self._limit = readers.limit
        self._data = b""
        self._at = 0  # where in the data the next field begins
        self._needed = 0  # how long the data must be for the next field to be whole, if it is known
        self._held_back = bytearray()  # arrived after the data, and not joined to it before that can help
        self._left = 0  # keys or pairs still to come of the request that is being read
        self._many_pairs = False  # what is to come are pairs
        self._keys: list[bytes] = []
        self._consumed = 0  # bytes of a request of many keys that were read already
        self._make: Callable[..., R]  # what is made of the request that is being read

    @property
    def validated(self) -> bool:
        """Whether the greeting has come."""
        return self._readers is self._known

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived."""
        if self._at == len(self._data):
            self._data = data
            self._at = self._needed = 0
            return
        self._held_back += data
        if len(self._data) + len(self._held_back) >= self._needed:
            self._data = self._data[self._at :] + self._held_back
            self._at = self._needed = 0
            self._held_back.clear()

    def take(self, data: bytes) -> R | None:
        """`feed` and `next` in one, for speed."""
        if self._at == len(self._data) and data and not self._left:
            self._data = data
            self._at = self._needed = 0
            return self._readers[data[0]](self, data, 1)
        self.feed(data)
        return self.next()

    def next(self) -> R | None:
        """What was made of the next whole request, or None until more bytes have been fed.

        Raises:
            StoreProtocolError: the bytes are not the protocol, or beyond its limits. The decoder is of no further use.
        """
        data = self._data
        at = self._at
        if at == len(data):
            self._data = b""  # an idle connection must not hold on to the last large value
            self._at = 0
            return None
        if self._left:
            return (self._next_pair if self._many_pairs else self._next_keys)(data, at, self._left)
        return self._readers[data[at]](self, data, at + 1)

    def _needs_more(self, end: int) -> bool:
        """Whether the data ends before `end`; if so, it is joined with what comes later when that reaches so far."""
        if end <= len(self._data):
            return False
        self._needed = end
        return True

    def _string(self, data: bytes, at: int, limit: int) -> int:
        """Where the string that begins at `at` ends, or -1 if it is not yet whole."""
        start = at + 8
        if start > len(data):
            self._needed = start
            return -1
        end: int = start + _u64(data, at)[0]
        if end > start + limit:
            raise refusal(Reason.LONG_KEY if limit == MAX_KEY else Reason.LONG_VALUE, end - start, limit)
        if end > len(data):
            self._needed = end
            return -1
        return end

    def _next_keys(self, data: bytes, at: int, left: int) -> R | None:
        keys = self._keys
        taken = self._consumed - at
        while left:
            end = self._string(data, at, MAX_KEY)
            if end < 0:
                if taken + self._needed > self._limit:
                    raise refusal(Reason.LONG_REQUEST, taken + self._needed, self._limit)
                break
            keys.append(data[at + 8 : end])
            left -= 1
            at = end
        self._at = at
        self._left = left
        self._consumed = taken + at
        return None if left else self._make(self._client, keys)

    def _next_pair(self, data: bytes, at: int, left: int) -> R | None:
        self._at = at
        self._left = left
        middle = self._string(data, at, MAX_KEY)
        if middle < 0:
            return None
        end = self._string(data, middle, MAX_PAYLOAD)
        if end < 0:
            return None
        self._at = end
        self._left = left - 1
        return self._make(self._client, data[at + 8 : middle], data[middle + 8 : end])


_Reader: TypeAlias = Callable[[Decoder[R], bytes, int], R | None]
"""Reads a request of one opcode from the data, from the byte after the opcode; None if it is not whole."""


class OpcodeReaders(Generic[R]):
    """The readers of each opcode, before and after the greeting, for one set of makers of requests.

    Args:
        makers: what is made of requests.
        limit: bytes of a request of many keys that may be kept until the rest has come.
    """

    def __init__(self, makers: Makers[R], limit: float = float("inf")) -> None:
        self.limit = limit
        known: dict[Op, _Reader[R]] = {
            op: _SHAPES[fields](makers[op]) for op, fields in FIELDS.items() if fields in _SHAPES and op in makers
        }
        known[Op.MULTI_SET] = _pairs(makers[Op.SET], makers[Op.MULTI_SET])
        known[Op.VALIDATE] = _refuse(Reason.GREETED_AGAIN)
        self.before_validate: tuple[_Reader[R], ...] = _by_opcode({Op.VALIDATE: _validate}, _refuse(Reason.NO_GREETING))
        self.requests = _by_opcode(known, _refuse(Reason.UNKNOWN_OPCODE))


def _by_opcode(known: Mapping[Op, _Reader[R]], unknown: _Reader[R]) -> tuple[_Reader[R], ...]:
    return tuple(known[Op(op)] if op in known else unknown for op in range(256))


def _no_fields(make: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], _data: bytes, at: int) -> R | None:
        decoder._at = at
        return make(decoder._client)

    return read


def _key(make: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], data: bytes, at: int) -> R | None:
        start = at + 8
        if start <= len(data):
            end = start + _u64(data, at)[0]
            if end <= len(data) and end <= start + MAX_KEY:
                decoder._at = end
                return make(decoder._client, data[start:end])
        decoder._string(data, at, MAX_KEY)
        return None

    return read


def _key_value(make: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], data: bytes, at: int) -> R | None:
        middle = decoder._string(data, at, MAX_KEY)
        if middle < 0:
            return None
        end = decoder._string(data, middle, MAX_PAYLOAD)
        if end < 0:
            return None
        decoder._at = end
        return make(decoder._client, data[at + 8 : middle], data[middle + 8 : end])

    return read


def _key_number(make: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], data: bytes, at: int) -> R | None:
        middle = decoder._string(data, at, MAX_KEY)
        end = middle + 8
        if middle < 0 or (end > len(data) and decoder._needs_more(end)):
            return None
        decoder._at = end
        return make(decoder._client, data[at + 8 : middle], _i64(data, middle)[0])

    return read


def _key_two_values(make: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], data: bytes, at: int) -> R | None:
        strings = []
        for limit in (MAX_KEY, MAX_PAYLOAD, MAX_PAYLOAD):
            end = decoder._string(data, at, limit)
            if end < 0:
                return None
            strings.append(data[at + 8 : end])
            at = end
        decoder._at = at
        return make(decoder._client, *strings)

    return read


def _keys(make: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], data: bytes, at: int) -> R | None:
        start = at + 16
        if start <= len(data):  # nearly always it is one key, and whole
            count, size = _u64_u64(data, at)
            end = start + size
            if count == 1 and end <= len(data) and size <= MAX_KEY:
                decoder._at = end
                return make(decoder._client, [data[start:end]])
        if decoder._needs_more(at + 8):
            return None
        (count,) = _u64(data, at)
        check(count, MAX_KEYS, Reason.MANY_KEYS)
        decoder._keys = []
        decoder._consumed = 9
        decoder._make = make
        decoder._many_pairs = False
        return decoder._next_keys(data, at + 8, count)

    return read


def _pairs(make: Callable[..., R], make_empty: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], data: bytes, at: int) -> R | None:
        if decoder._needs_more(at + 8):
            return None
        (count,) = _u64(data, at)
        check(count, MAX_KEYS, Reason.MANY_KEYS)
        if not count:
            decoder._at = at + 8
            return make_empty(decoder._client, ())
        decoder._make = make
        decoder._many_pairs = True
        return decoder._next_pair(data, at + 8, count)

    return read


def _u32_only(make: Callable[..., R]) -> _Reader[R]:
    def read(decoder: Decoder[R], data: bytes, at: int) -> R | None:
        if decoder._needs_more(at + 4):
            return None
        decoder._at = at + 4
        return make(decoder._client, _u32(data, at)[0])

    return read


def _validate(decoder: Decoder[R], data: bytes, at: int) -> R | None:
    if decoder._needs_more(at + 4):
        return None
    (magic,) = _u32(data, at)
    if magic != MAGIC:
        raise refusal(Reason.WRONG_MAGIC, magic, MAGIC)
    decoder._at = at + 4
    decoder._readers = decoder._known
    return decoder.next()


def _refuse(reason: Reason) -> _Reader[R]:
    def read(_decoder: Decoder[R], data: bytes, at: int) -> R | None:
        raise refusal(reason, first=data[at - 1 : at + 15])

    return read


_SHAPES: dict[tuple[str, ...], Callable[[Callable[..., R]], _Reader[R]]] = {
    (): _no_fields,
    ("u32",): _u32_only,
    ("key",): _key,
    ("key", "i64"): _key_number,
    ("key", "value"): _key_value,
    ("key", "value", "value"): _key_two_values,
    ("keys",): _keys,
}
"""How to read requests with these fields. MULTI_SET's pairs are read as one SET for each."""
