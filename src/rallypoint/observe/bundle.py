"""Incident bundles: what one node knows of one failure, as files in a small folder, and the index over all nodes; and
what `rallyctl report` shows of the bundles that a folder holds.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from shutil import rmtree
from typing import Any, NamedTuple

import msgspec

from rallypoint.base.log import printable

VERSION = 1
LIMIT = 10 * 1024 * 1024
"""Bytes of the files of one bundle."""
ON_DEMAND_LIMIT = 1024 * 1024
"""The same of one that travels to an operator."""
SUMMARY, INDEX = "incident.json", "index.json"
_SUMMARY_ROOM = 256 * 1024
_MAX_FILES = 4096
_MAX_SUMMARY = 1024 * 1024
_MAX_BUNDLES = 100_000
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

    def fill(hidden: str) -> None:
        os.mkdir(hidden, 0o700)
        for piece in pieces:
            path = os.path.join(hidden, piece.name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            _write(path, piece.data)

    return _appear(parent, (f"{name}.{number}" if number else name for number in range(_MOST)), fill)


def write_index(parent: str, fields: dict[str, Any]) -> str:
    """Write the index over all nodes, beside one that is there already, and return its path. Raises OSError."""
    text = json.dumps({"version": VERSION, **fields}, indent=2) + "\n"
    stem, end = os.path.splitext(INDEX)
    names = (f"{stem}-{number}{end}" if number > 1 else INDEX for number in range(1, _MOST))
    return _appear(parent, names, lambda hidden: _write(hidden, text.encode()))


_MOST = 10_000
"""Folders, or indices, of one name."""


def _write(path: str, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _appear(parent: str, names: Iterator[str], make: Callable[[str], None]) -> str:
    """Make a file or folder beside its place, and give it the first of these names that is free. Raises OSError."""
    os.makedirs(parent, exist_ok=True)
    hidden = os.path.join(parent, f".new.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        make(hidden)
        is_file = os.path.isfile(hidden)
        for path in (os.path.join(parent, each) for each in names):
            if os.path.lexists(path):
                continue
            try:
                if is_file:
                    _link(hidden, path)
                else:
                    os.rename(hidden, path)
            except OSError:  # somebody else has taken the name meanwhile
                if not os.path.lexists(path):
                    raise
                continue
            return path
        raise OSError(f"{parent} is too full of incidents")
    finally:
        if os.path.isfile(hidden):
            os.unlink(hidden)
        rmtree(hidden, ignore_errors=True)


def _link(new: str, path: str) -> None:
    """Give a file a name, and never that of another."""
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.rename(new, path)


# Reading what a folder holds


class Incident(NamedTuple):
    """What one node has kept of one failure. `at` is in seconds since 1970, by the clock of that node."""

    job: str
    round: int
    at: float
    why: str
    headline: str
    host: str
    pid: int
    group_rank: int
    ranks: tuple[int, ...]
    folder: str


class Incidents(NamedTuple):
    """The bundles that were found, oldest first, and what could not be read, in sentences."""

    found: tuple[Incident, ...]
    notes: tuple[str, ...]


def read_incidents(paths: Iterable[str]) -> Incidents:
    found: list[Incident] = []
    notes: list[str] = []
    for path in _summaries(paths):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                found.append(_incident(json.loads(file.read(_MAX_SUMMARY)), os.path.dirname(path)))
        except OSError as error:
            notes.append(f"{path} cannot be read: {error.strerror}")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            notes.append(f"{path} is no summary of an incident that this version can read")
        if len(found) >= _MAX_BUNDLES:
            notes.append(f"there are more than {_MAX_BUNDLES} incidents; the others are left out")
            break
    return Incidents(tuple(sorted(found, key=lambda each: (each.at, each.group_rank))), tuple(notes))


def incident_lines(found: Sequence[Incident]) -> list[str]:
    """The incidents for people: each with its cause once, and the nodes that have kept something of it."""
    groups: dict[tuple[str, int, str], list[Incident]] = {}
    for each in found:
        groups.setdefault((each.job, each.round, os.path.dirname(each.folder)), []).append(each)
    lines: list[str] = []
    for (job, round_, folder), nodes in groups.items():
        first = next((each for each in nodes if each.headline), nodes[0])
        lines.append(f"job {job}, round {round_}: {first.why}{f': {first.headline}' if first.headline else ''}")
        lines.append(f"    {len(nodes)} node{'' if len(nodes) == 1 else 's'} in {printable(folder, 400)}")
    return lines


def incidents_json(incidents: Incidents) -> str:
    rows = [each._asdict() for each in incidents.found]
    return json.dumps({"version": VERSION, "incidents": rows, "notes": incidents.notes}, indent=2)


def _summaries(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if os.path.isfile(path) and os.path.basename(path) == SUMMARY:
            yield path
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(each for each in folders if not each.startswith("."))
            if SUMMARY in files:
                folders.clear()
                yield os.path.join(folder, SUMMARY)


def _incident(fields: dict[str, Any], folder: str) -> Incident:
    if fields["version"] != VERSION:
        raise ValueError("another version")
    node = fields["node"]
    return Incident(
        job=printable(str(fields["job"]), 200),
        round=int(fields["round"]),
        at=float(fields["at"]),
        why=printable(str(fields["why"]), 200),
        headline=printable(str(fields["headline"]), 1000),
        host=printable(str(node["host"]), 255),
        pid=int(node["pid"]),
        group_rank=int(node["group_rank"]),
        ranks=tuple(int(each) for each in node["ranks"]),
        folder=folder,
    )
