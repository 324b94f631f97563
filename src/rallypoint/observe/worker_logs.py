"""The output of workers, as sent to an operator (`rallyctl logs`) and as displayed lines. Pure.

Law: a program's lines are shown without anything that could affect the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from rallypoint.control.protocol.validation import decoded

CONSOLE = -1
"""Replaces a rank: a node's whole console output, if that is a file."""
OVERHEAD, OVERHEAD_OF_PIECE = 1024, 16
"""Bytes per answer, and per piece, in addition to the workers' output."""
_MOST_NOTES, _LONGEST_NOTE = 4, 200
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class LogPiece(NamedTuple):
    """Lines from the worker with a global rank."""

    rank: int
    data: bytes


class NodeLogs(NamedTuple):
    """One node's output; `notes` are sentences about unreadable parts."""

    pieces: tuple[LogPiece, ...]
    notes: tuple[str, ...] = ()


_decoder = msgspec.msgpack.Decoder(NodeLogs)


def encode_logs(logs: NodeLogs) -> bytes:
    return msgspec.msgpack.encode(logs)


def decode_logs(data: bytes) -> NodeLogs:
    """Decode logs. Raises ValueError if they are malformed. An empty answer means no news."""
    if not data:
        return NodeLogs(())
    pieces, notes = decoded(_decoder, data)
    return NodeLogs(pieces, tuple(_clean(note[:_LONGEST_NOTE]) for note in notes[:_MOST_NOTES]))


def log_lines(logs: NodeLogs, node: str, *, labelled: bool) -> Iterator[str]:
    """Format the lines, each after `[rank3]: `, or after the node's name if they come from several ranks."""
    for rank, data in logs.pieces:
        label = "" if not labelled else f"[{node}]: " if rank == CONSOLE else f"[rank{rank}]: "
        for line in data.decode(errors="replace").removesuffix("\n").split("\n"):
            yield f"{label}{_clean(line.removesuffix(chr(13)).rpartition(chr(13))[2])}"  # a progress bar's last state


def _clean(line: str) -> str:
    plain = _COLOURS.sub("", line)
    return plain if plain.isprintable() else "".join(c if c.isprintable() or c == "\t" else "?" for c in plain)
