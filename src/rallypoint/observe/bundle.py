"""Incident bundles: what one node knows of one failure, as files in a small folder, and the index over all nodes.

    DIR/<job>/<incident>/<host>-<pid>/incident.json ...     one folder a node
    DIR/<job>/<incident>/index.json                         how the job stood, by the coordinator's node

`docs/reference/incident-bundle.md` describes each file. Laws:

1. A bundle never has more bytes than it may: what is most worth to know comes first, and what has no room is named.
2. A folder appears whole or not at all.
3. What comes from another node is checked before it is written: names, sizes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from shutil import rmtree
from typing import Any, NamedTuple

import msgspec

VERSION = 1
LIMIT = 10 * 1024 * 1024
"""Bytes of the files of one bundle."""
ON_DEMAND_LIMIT = 1024 * 1024
"""The same of one that travels to an operator."""
SUMMARY, INDEX = "incident.json", "index.json"
_SUMMARY_ROOM = 256 * 1024
_MAX_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}(?:/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}){0,2}")


class Piece(NamedTuple):
    """One file of a bundle; `is_whole` if a part of it is worth nothing. Of others the end is kept."""

    name: str
    data: bytes
    is_whole: bool = False


class Fitted(NamedTuple):
    """What fits, and a text about what was cut or left out."""

    pieces: tuple[Piece, ...]
    left_out: tuple[str, ...]


def fit(pieces: Iterable[Piece], limit: int) -> Fitted:
    """As many pieces as fit into so many bytes, in their order."""
    kept: list[Piece] = []
    notes: list[str] = []
    left = limit
    for piece in pieces:
        size = len(piece.data)
        if size <= left:
            kept.append(piece)
            left -= size
        elif piece.is_whole or left < 1024:
            notes.append(f"{piece.name}: {size} bytes were left out")
        else:
            kept.append(piece._replace(data=piece.data[-left:]))
            notes.append(f"{piece.name}: the last {left} of {size} bytes")
            left = 0
    return Fitted(tuple(kept), tuple(notes))


def bundle(summary: dict[str, Any], pieces: Sequence[Piece], limit: int) -> tuple[Piece, ...]:
    """The files of a bundle, its summary first, which says what has no room."""
    fitted = fit(pieces, max(0, limit - _SUMMARY_ROOM))
    files = {each.name: len(each.data) for each in fitted.pieces}
    fields = {"version": VERSION, **summary, "files": files, "left_out": list(fitted.left_out)}
    text = json.dumps(fields, indent=2).encode()
    if len(text) > min(limit, _SUMMARY_ROOM):
        text = json.dumps({"version": VERSION, "job": summary["job"], "left_out": ["the summary is too long"]}).encode()
    return Piece(SUMMARY, text), *fitted.pieces


# On its way to an operator

_decoder = msgspec.msgpack.Decoder(tuple[Piece, ...])


def encode_bundle(pieces: Sequence[Piece]) -> bytes:
    """A bundle as bytes."""
    return zlib.compress(msgspec.msgpack.encode(tuple(pieces)), 6)


def decode_bundle(data: bytes) -> tuple[Piece, ...]:
    """The bundle that another node has encoded.

    Raises:
        ValueError: these bytes are none, or it is larger than it may be.
    """
    inflate = zlib.decompressobj()
    most = 2 * ON_DEMAND_LIMIT
    try:
        raw = inflate.decompress(data, most)
        if inflate.unconsumed_tail:
            raise ValueError(f"it has more than {most} bytes")
        pieces = _decoder.decode(raw)
    except (zlib.error, msgspec.DecodeError) as error:
        raise ValueError(str(error)) from None
    names = {each.name for each in pieces}
    bad = next((name for name in names if not _NAME.fullmatch(name)), None)
    if bad is not None or len(pieces) > _MAX_FILES or len(names) < len(pieces):
        raise ValueError(f"it names its files in a way that is refused ({bad!r})" if bad else "it has too many files")
    return pieces


# On disk


def safe_name(text: str, most: int = 100) -> str:
    """A text as a name in a folder: letters, digits, points and dashes."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", text).lstrip(".-")[:most] or "_"


def write_bundle(parent: str, name: str, pieces: Sequence[Piece]) -> str:
    """Write the files into a new folder, and return its path.

    Args:
        parent: made if it is missing.
        name: of the folder; with a number behind it if there is one of that name.
        pieces: what to write.

    Raises:
        OSError: the disk does not take it; nothing is left then.
    """
    os.makedirs(parent, exist_ok=True)
    hidden = os.path.join(parent, f".{name}.{os.getpid()}.{os.urandom(4).hex()}")
    os.mkdir(hidden, 0o700)
    try:
        for piece in pieces:
            path = os.path.join(hidden, piece.name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(piece.data)
        return _rename(hidden, parent, name)
    except BaseException:
        rmtree(hidden, ignore_errors=True)
        raise


def _rename(hidden: str, parent: str, name: str) -> str:
    for number in range(10000):
        path = os.path.join(parent, name if not number else f"{name}.{number}")
        if os.path.lexists(path):
            continue
        try:
            os.rename(hidden, path)
        except (FileExistsError, OSError):
            if not os.path.lexists(path):
                raise
            continue
        return path
    raise OSError(f"{parent} has too many folders {name}")


def write_index(parent: str, fields: dict[str, Any]) -> str:
    """Write the index over all nodes, beside one that is there already, and return its path. Raises OSError."""
    os.makedirs(parent, exist_ok=True)
    text = json.dumps({"version": VERSION, **fields}, indent=2) + "\n"
    new = os.path.join(parent, f".{INDEX}.{os.getpid()}.{os.urandom(4).hex()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    stem, end = os.path.splitext(INDEX)
    try:
        for number in range(1, 10000):
            path = os.path.join(parent, INDEX if number == 1 else f"{stem}-{number}{end}")
            try:
                os.link(new, path)  # never over another
            except FileExistsError:
                continue
            except OSError:  # a file system without links
                os.rename(new, path)
            return path
    finally:
        if os.path.exists(new):
            os.unlink(new)
    raise OSError(f"{parent} has too many of {INDEX}")
