"""Inputs near to valid ones, out of a seed: what runs without coverage, and what hostile peers send. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_WORDS = (
    *(b"\x00", b"\xc0", b"\xc2", b"\xc3", b"\xcb\x7f\xf0\0\0\0\0\0\0", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\x90", b"\xa0"),
    *(b"1e999", b"-1", b"NaN", b"Infinity", b"null", b"{}", b"[]", b'""', b"\\ud800", b"\xed\xa0\x80", b"\x1b[31m"),
    *(b"9" * 20, b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"\n", b"\r\n", b" ", b",", b"=", b":", b"--", b"%"),
)
"""What decoders stumble over: MessagePack's and JSON's edges, depths, texts that are none, what parts other things."""


def mutated(random: Random, valid: Sequence[bytes], most: int = 4096) -> bytes:
    """One of the valid inputs with some damage, at most so many bytes of it."""
    data = bytearray(random.choice(valid))
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 6))):
        at, end = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
        match random.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 1 if data:
                data[at % len(data)] = random.randrange(256)
            case 2:
                del data[at : min(end, at + 16)]
            case 3:
                data[at:at] = data[at : min(end, at + 64)]
            case 4:
                data[at:at] = random.choice(_WORDS)
            case 5:
                width = random.choice((1, 2, 4, 8))
                number = random.choice(_NUMBERS) & ((1 << 8 * width) - 1)
                data[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
            case 6:
                other = random.choice(valid)
                start = random.randrange(len(other) + 1)
                data[at:end] = other[start : start + 256]
            case _:
                data[at:at] = random.randbytes(random.randrange(9))
    return bytes(data[:most])
