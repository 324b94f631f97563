"""A recorded start-up: what each connection to a store said, and how much it was answered."""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec

FOLDER = Path(__file__).resolve().parent / "recorded"


class Dialogue(msgspec.Struct):
    """One connection. Each message is sent when as many bytes have come back as the one before it earned."""

    messages: list[bytes] = []
    replies: list[int] = []
    """Bytes that came back after the message of the same place."""


class Recording(msgspec.Struct):
    """All connections of one start-up, in the order in which they were made."""

    ranks: int
    dialogues: list[Dialogue]


def read(path: Path) -> Recording:
    """Raises OSError, lzma.LZMAError or msgspec.DecodeError where there is no recording."""
    return msgspec.msgpack.decode(lzma.decompress(path.read_bytes()), type=Recording)
