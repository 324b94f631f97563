"""A worker that writes a known text to both of its streams, as fast as it can, once it is let through the gate.

    writer FOLDER LINES LENGTH

`FOLDER/ready.<rank>` says that the text is made; `FOLDER/gate` is locked until all shall begin.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

STREAMS = (1, 2)
_BLOCK = 64 * 1024


def text(rank: int, stream: int, lines: int, length: int) -> bytes:
    """All that one worker writes to one stream: `lines` lines of `length` bytes, their newlines included."""
    begin = b"%d %d " % (rank, stream)
    return b"".join((begin + b"%d " % number).ljust(length - 1, b".") + b"\n" for number in range(lines))


def main(folder: Path, lines: int, length: int) -> None:
    """Write it."""
    rank = int(os.environ["RANK"])
    texts = {stream: memoryview(text(rank, stream, lines, length)) for stream in STREAMS}
    (folder / f"ready.{rank}").touch()
    with open(folder / "gate") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
    at = 0
    while at < lines * length:
        for stream, data in texts.items():
            left = data[at : at + _BLOCK]
            while left:
                left = left[os.write(stream, left) :]
        at += _BLOCK


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
