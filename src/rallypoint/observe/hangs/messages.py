"""The evidence that a node sends about its hanging ranks, as data, and its check on arrival. Pure.

Laws:

1. It is checked once, in `decode_evidence`. Lengths and numbers that cannot be are refused, and so is text that does
   not print, since nothing of ours has written it.
2. Many nodes' evidence is small on the way, since it is compressed and ranks are told as runs, and small where it is
   gathered, since what is equal is kept once (`EvidenceReader`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, TypeVar

import msgspec

from rallypoint.control.protocol.ranges import MAX_WORKERS
from rallypoint.control.protocol.validation import decoded
from rallypoint.observe.stacks import MAX_FRAMES, Frame

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
_MAX_MEMBERS = 2**20
_MAX_RUNS = 65536

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
    there are none. `note` is what is known besides: a traceback that it has written, what it waits for. `children` are
    the processes that it has started, where its main thread seems to wait for those.
    """

    rank: _Rank
    state: _Text
    exit_code: Annotated[int, msgspec.Meta(ge=-1024, le=1024)] | None = None
    where: _Text = ""
    kernel: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_KERNEL)] = ()
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=MAX_FRAMES)] = ()
    why_none: _Text = ""
    note: _Text = ""
    children: Annotated[tuple[ProcessEvidence, ...], msgspec.Meta(max_length=MAX_CHILDREN)] = ()


class Collective(msgspec.Struct, frozen=True, array_like=True):
    """One collective of a process group, as a rank's flight recorder has it. `place` is where in the user's code it was
    called, where the dump says so."""

    sequence: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    operation: Annotated[str, msgspec.Meta(max_length=100)]
    done: bool
    place: _Text = ""


class RankRange(msgspec.Struct, frozen=True, array_like=True):
    """Ranks at equal distances: the first, how many, and from one to the next."""

    first: _Rank
    count: Annotated[int, msgspec.Meta(ge=1, le=_MAX_MEMBERS)]
    step: Annotated[int, msgspec.Meta(ge=1, lt=2**32)] = 1


def runs_of(ranks: Iterable[int]) -> tuple[RankRange, ...]:
    """Ranks in as few runs as can be found by going along them: a group of a mesh is one."""
    in_order = sorted(set(ranks))
    runs, at = [], 0
    while at < len(in_order):
        first = in_order[at]
        step = in_order[at + 1] - first if at + 1 < len(in_order) else 1
        count = 1
        while at + count < len(in_order) and in_order[at + count] == first + count * step:
            count += 1
        runs.append(RankRange(first, count, step))
        at += count
    return tuple(runs)


@lru_cache(maxsize=1024)
def ranks_of(runs: tuple[RankRange, ...]) -> tuple[int, ...]:
    """The ranks of some runs."""
    return tuple(chain.from_iterable(range(run.first, run.first + run.count * run.step, run.step) for run in runs))


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """The last collectives of one process group on one rank. `members` are global ranks, none if they are not told."""

    name: _Text
    description: _Text
    members: Annotated[tuple[RankRange, ...], msgspec.Meta(max_length=_MAX_RUNS)]
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
    ranks: Annotated[tuple[RankEvidence, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    kept: _Text = ""
    records: Annotated[tuple[RankRecord, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    dumps: _Text = ""
    stacks_follow: bool = False


MAX_INFLATED = 64 * 1024 * 1024
"""Bytes of what one node sends, when it is no longer compressed."""
_MAX_STACKS = 4096
"""Stacks that are kept whole of all that differ."""
_MOST_OF_OTHERS = 4
"""Frames of others that are kept: the innermost."""
_decoder = msgspec.json.Decoder(NodeEvidence)
T = TypeVar("T")


def deflated(data: bytes) -> bytes:
    """The bytes for the way."""
    return zlib.compress(data, 6)


def inflated(data: bytes, most: int = MAX_INFLATED) -> bytes:
    """Undo `deflated`. Raises ValueError for bytes that are something else, or become more than `most`."""
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, most)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if inflate.unconsumed_tail or not inflate.eof:
        raise ValueError(f"it is not whole, or has more than {most} bytes")
    return raw


def encode_evidence(evidence: NodeEvidence) -> bytes:
    return deflated(msgspec.json.encode(evidence))


def decode_evidence(data: bytes) -> NodeEvidence:
    """Raises ValueError for bytes that are something else, or say what cannot be."""
    return check_evidence(inflated(data))


def check_evidence(data: bytes) -> NodeEvidence:
    """The same for what is not compressed."""
    evidence = decoded(_decoder, data)
    # All of it at once, where no text can hold what the whole does not show: nearly always, at a tenth of the cost.
    plain = b"\\" not in data and data.decode().isprintable()
    if not plain and (bad := next((text for text in _texts(evidence) if not text.isprintable()), None)) is not None:
        raise ValueError(f"a text of it cannot be printed: {bad[:80]!r}")
    groups = (group for record in evidence.records for group in record.groups)
    if any(sum(run.count for run in group.members) > _MAX_MEMBERS for group in groups):
        raise ValueError(f"a process group has more than {_MAX_MEMBERS} members")
    return evidence


class EvidenceReader:
    """Reads the evidence of many nodes, and keeps what is equal once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._stacks = 0

    def read(self, data: bytes) -> NodeEvidence:
        """As `decode_evidence`."""
        evidence = decode_evidence(data)
        ranks = (
            msgspec.structs.replace(
                rank,
                frames=self._stack(rank.frames),
                kernel=self._shared(rank.kernel),
                children=self._shared(rank.children),
            )
            for rank in evidence.ranks
        )
        records = (
            msgspec.structs.replace(record, groups=tuple(map(self._group, record.groups)))
            for record in evidence.records
        )
        return msgspec.structs.replace(evidence, ranks=tuple(ranks), records=tuple(records))

    def _stack(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        if frames not in self._known:
            self._stacks += 1
            frames = frames if self._stacks <= _MAX_STACKS else frames[:_MOST_OF_OTHERS]
        return self._shared(frames)

    def _group(self, group: GroupRecord) -> GroupRecord:
        return GroupRecord(group.name, group.description, self._shared(group.members), self._shared(group.last))

    def _shared(self, value: T) -> T:
        return self._known.setdefault(value, value)  # type: ignore[no-any-return]


def _texts(evidence: NodeEvidence) -> Iterator[str]:
    yield from (evidence.host, evidence.kept, evidence.dumps)
    for rank in evidence.ranks:
        yield from (rank.state, rank.where, rank.why_none, rank.note, *rank.kernel)
        for child in rank.children:
            yield from (child.state, child.where)
        for frame in (*rank.frames, *(frame for child in rank.children for frame in child.frames)):
            yield from (frame.function, frame.file)
    for record in evidence.records:
        yield from (record.why_none, *record.pending)
        for group in record.groups:
            yield from (group.name, group.description)
            for operation in group.last:
                yield from (operation.operation, operation.place)


def title(name: str, description: str) -> str:
    return description if description not in ("", "undefined") else f"process group {name}"
