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

    def sent(self, data: bytes) -> None:
        """The client has sent this. What follows without an answer belongs to the same message."""
        if self.messages and not self.replies[-1]:
            self.messages[-1] += data
        else:
            self.messages.append(data)
            self.replies.append(0)

    def came(self, size: int) -> None:
        """So many bytes have come back."""
        self.replies[-1] += size


class Recording(msgspec.Struct):
    """All connections of one start-up, in the order in which they were made."""

    ranks: int
    dialogues: list[Dialogue]


def write(path: Path, recording: Recording) -> None:
    """Write it, compressed: ranks say much the same."""
    path.write_bytes(lzma.compress(msgspec.msgpack.encode(recording), preset=9))


def read(path: Path) -> Recording:
    """Raises OSError, lzma.LZMAError or msgspec.DecodeError where there is no recording."""
    return msgspec.msgpack.decode(lzma.decompress(path.read_bytes()), type=Recording)
