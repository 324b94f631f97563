"""The evidence that a node sends about its hanging ranks, as data, and its check on arrival. Pure.

Law: it is checked once, in `decode_evidence`. Lengths and numbers that cannot be are refused, and so is text that does
not print, since nothing of ours has written it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from rallypoint.observe.hangs.frames import Frame

MAX_FRAMES = 40
"""Frames of one rank's main thread that are sent: the innermost."""
MAX_TEXT = 300
"""Characters of a text that is sent."""
MAX_CHILDREN = 8
"""Processes that one rank has started of which evidence is sent."""
MAX_CHILD_FRAMES = 16
"""The same of each of them: frames, the innermost."""
MAX_KERNEL = 32
"""Lines of a kernel stack."""
MAX_GROUPS = 32
"""Process groups of one rank that are sent: the first."""
MAX_KEPT = 8
"""Collectives of one process group that are sent: the last."""
_MAX_MEMBERS = 65536
_MAX_WORKERS = 65536

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class ProcessEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process that a worker has started was found in, as in `RankEvidence`."""

    state: _Text
    where: _Text = ""
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=MAX_CHILD_FRAMES)] = ()


class RankEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """The evidence of one rank.

    `where` is the place in the kernel that it waits in, where that may be read, and `kernel` the kernel's stack, of a
    process in uninterruptible sleep. `frames` are those of its main thread, the innermost first; `why_none` says why
    there are none. `children` are the processes that it has started, where its main thread seems to wait for those.
    """

    rank: _Rank
    state: _Text
    exit_code: Annotated[int, msgspec.Meta(ge=-1024, le=1024)] | None = None
    where: _Text = ""
    kernel: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_KERNEL)] = ()
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=MAX_FRAMES)] = ()
    why_none: _Text = ""
    children: Annotated[tuple[ProcessEvidence, ...], msgspec.Meta(max_length=MAX_CHILDREN)] = ()


class Collective(msgspec.Struct, frozen=True, array_like=True):
    """One collective of a process group, as a rank's flight recorder has it. `place` is where in the user's code it was
    called, where the dump says so."""

    sequence: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    operation: Annotated[str, msgspec.Meta(max_length=100)]
    done: bool
    place: _Text = ""


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """The last collectives of one process group on one rank. `members` are global ranks, none if they are not told."""

    name: _Text
    description: _Text
    members: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=_MAX_MEMBERS)]
    last: Annotated[tuple[Collective, ...], msgspec.Meta(max_length=MAX_KEPT)]


class RankRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the flight recorder of one rank has, or `why_none`. `pending` names the last sends and receives that are not
    complete."""

    rank: _Rank
    groups: Annotated[tuple[GroupRecord, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    pending: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_KEPT)] = ()
    why_none: _Text = ""


class NodeEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one node has found. `kept` is the file there that has all of it, and `dumps` what the paths of the dumps
    begin with that process groups have written; empty for none. `stacks_follow`: whoever has none writes it to its
    standard error when it is ended, which will be now."""

    host: _Text
    ranks: Annotated[tuple[RankEvidence, ...], msgspec.Meta(max_length=_MAX_WORKERS)] = ()
    kept: _Text = ""
    records: Annotated[tuple[RankRecord, ...], msgspec.Meta(max_length=_MAX_WORKERS)] = ()
    dumps: _Text = ""
    stacks_follow: bool = False


_decoder = msgspec.json.Decoder(NodeEvidence)


def encode_evidence(found: NodeEvidence) -> bytes:
    """What `decode_evidence` takes."""
    return msgspec.json.encode(found)


def decode_evidence(data: bytes) -> NodeEvidence:
    """The evidence of one node, checked.

    Raises:
        ValueError: these bytes are something else, or say what cannot be.
    """
    try:
        found = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if bad := next((text for text in _texts(found) if not text.isprintable()), None):
        raise ValueError(f"a text of it cannot be printed: {bad[:80]!r}")
    return found


def _texts(found: NodeEvidence) -> Iterator[str]:
    yield from (found.host, found.kept, found.dumps)
    for rank in found.ranks:
        yield from (rank.state, rank.where, rank.why_none, *rank.kernel)
        for child in rank.children:
            yield from (child.state, child.where)
        for frame in (*rank.frames, *(each for child in rank.children for each in child.frames)):
            yield from (frame.function, frame.file)
    for record in found.records:
        yield from (record.why_none, *record.pending)
        for group in record.groups:
            yield from (group.name, group.description)
            for each in group.last:
                yield from (each.operation, each.place)


def title(name: str, description: str) -> str:
    """The readable name of a process group."""
    return description if description not in ("", "undefined") else f"process group {name}"
