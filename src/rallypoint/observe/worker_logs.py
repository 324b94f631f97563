"""What workers have written, on its way to an operator (`rallyctl logs`), and as lines there. Pure.

Law: a line that came from a program is shown without anything that could change the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from rallypoint.control.protocol.validation import decoded

CONSOLE = -1
"""In place of a rank: all that a node writes to its console, if that is a file."""
OVERHEAD, OVERHEAD_OF_PIECE = 1024, 16
"""Bytes of an answer, and of each piece of it, beyond what workers have written."""
_MOST_NOTES, _LONGEST_NOTE = 4, 200
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class LogPiece(NamedTuple):
    """Lines of the worker of a global rank."""

    rank: int
    data: bytes


class NodeLogs(NamedTuple):
    """What one node has sent; `notes` are sentences about what cannot be read."""

    pieces: tuple[LogPiece, ...]
    notes: tuple[str, ...] = ()


_decoder = msgspec.msgpack.Decoder(NodeLogs)


def encode_logs(logs: NodeLogs) -> bytes:
    return msgspec.msgpack.encode(logs)


def decode_logs(data: bytes) -> NodeLogs:
    """Raises ValueError for bytes that are something else. Nothing at all is an answer: there is nothing new."""
    if not data:
        return NodeLogs(())
    pieces, notes = decoded(_decoder, data)
    return NodeLogs(pieces, tuple(_clean(note[:_LONGEST_NOTE]) for note in notes[:_MOST_NOTES]))


def log_lines(logs: NodeLogs, node: str, *, labelled: bool) -> Iterator[str]:
    """The lines for a person, with `[rank3]: ` before each, or the node's name where they are of several ranks."""
    for rank, data in logs.pieces:
        label = "" if not labelled else f"[{node}]: " if rank == CONSOLE else f"[rank{rank}]: "
        for line in data.decode(errors="replace").removesuffix("\n").split("\n"):
            yield f"{label}{_clean(line.removesuffix(chr(13)).rpartition(chr(13))[2])}"  # of a progress bar the last


def _clean(line: str) -> str:
    plain = _COLOURS.sub("", line)
    return plain if plain.isprintable() else "".join(c if c.isprintable() or c == "\t" else "?" for c in plain)
