"""A node's evidence about its hung ranks, as data, and the check of it on arrival. Pure.

Laws:

1. Evidence is checked once, in `decode_evidence`, which refuses impossible lengths and numbers, and unprintable text,
   which our code never writes.
2. Many nodes' evidence is small on the wire, since it is compressed and stores ranks as runs. It is small at the
   receiver, since equal parts are stored once (`EvidenceReader`).
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
"""Maximum number of characters in a text."""
MAX_CHILDREN = 8
"""Maximum number of child processes per rank."""
MAX_CHILD_FRAMES = 16
"""Maximum number of frames per child process: the innermost ones."""
MAX_KERNEL = 32
"""Maximum number of lines in a kernel stack."""
MAX_GROUPS = 32
"""Maximum number of process groups per rank: the first ones."""
MAX_KEPT = 8
"""Maximum number of collectives per process group: the last ones."""
_MAX_MEMBERS = 2**20
_MAX_RUNS = 65536

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class ProcessEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Evidence about a worker's child process; see `RankEvidence`."""

    state: _Text
    where: _Text = ""
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=MAX_CHILD_FRAMES)] = ()


class RankEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Evidence about one rank.

    `where` is its place in the kernel, if readable; `kernel` is the kernel stack of a process in uninterruptible sleep.
    `frames` are its main thread's, innermost first; `why_none` says why there are none. `note` has other information: a
    traceback that it wrote, or what it is waiting for. `children` are its child processes, if its main thread seems to
    wait for them.
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
    """One collective of a process group, from a rank's flight recorder. `place` is where the user's code called it, if
    known.
    """

    sequence: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    operation: Annotated[str, msgspec.Meta(max_length=100)]
    done: bool
    place: _Text = ""


class RankRange(msgspec.Struct, frozen=True, array_like=True):
    """Evenly spaced ranks: the first one, how many there are, and the distance."""

    first: _Rank
    count: Annotated[int, msgspec.Meta(ge=1, le=_MAX_MEMBERS)]
    step: Annotated[int, msgspec.Meta(ge=1, lt=2**32)] = 1


def runs_of(ranks: Iterable[int]) -> tuple[RankRange, ...]:
    """Express ranks as few runs, found in one pass: a group in a mesh is one run."""
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
    """The ranks in some runs."""
    return tuple(chain.from_iterable(range(run.first, run.first + run.count * run.step, run.step) for run in runs))


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """The last collectives of one process group on one rank. `members` are global ranks, empty if unknown."""

    name: _Text
    description: _Text
    members: Annotated[tuple[RankRange, ...], msgspec.Meta(max_length=_MAX_RUNS)]
    last: Annotated[tuple[Collective, ...], msgspec.Meta(max_length=MAX_KEPT)]


class RankRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Data from one rank's flight recorder, or `why_none`. `pending` lists the last incomplete sends and receives."""

    rank: _Rank
    groups: Annotated[tuple[GroupRecord, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    pending: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_KEPT)] = ()
    why_none: _Text = ""


class NodeEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Evidence from one node. `kept` is the node's file with all of it, and `dumps` the path prefix of the process
    groups' dumps; empty for none. `stacks_follow`: workers without stacks are about to be ended, and will write them
    to standard error.
    """

    host: _Text
    ranks: Annotated[tuple[RankEvidence, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    kept: _Text = ""
    records: Annotated[tuple[RankRecord, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    dumps: _Text = ""
    stacks_follow: bool = False


MAX_INFLATED = 64 * 1024 * 1024
"""Maximum size of a node's evidence after decompression, in bytes."""
_MAX_STACKS = 4096
"""How many different stacks to keep whole."""
_MOST_OF_OTHERS = 4
"""How many frames to keep of other stacks: the innermost ones."""
_decoder = msgspec.json.Decoder(NodeEvidence)
T = TypeVar("T")


def deflated(data: bytes) -> bytes:
    """Compress bytes for sending."""
    return zlib.compress(data, 6)


def inflated(data: bytes, most: int = MAX_INFLATED) -> bytes:
    """Undo `deflated`. Raises ValueError if the bytes are malformed or decompress to more than `most`."""
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, most)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if inflate.unconsumed_tail or not inflate.eof:
        raise ValueError(f"it is incomplete, or larger than {most} bytes")
    return raw


def encode_evidence(evidence: NodeEvidence) -> bytes:
    return deflated(msgspec.json.encode(evidence))


def decode_evidence(data: bytes) -> NodeEvidence:
    """Decode evidence. Raises ValueError if it is malformed or contains impossible values."""
    return check_evidence(inflated(data))


def check_evidence(data: bytes) -> NodeEvidence:
    """Like `decode_evidence`, for uncompressed bytes."""
    evidence = decoded(_decoder, data)
    # If no text can contain escaped characters, check everything at once: nearly always, at a tenth of the cost.
    plain = b"\\" not in data and data.decode().isprintable()
    if not plain and (bad := next((text for text in _texts(evidence) if not text.isprintable()), None)) is not None:
        raise ValueError(f"it contains the unprintable text {bad[:80]!r}")
    groups = (group for record in evidence.records for group in record.groups)
    if any(sum(run.count for run in group.members) > _MAX_MEMBERS for group in groups):
        raise ValueError(f"a process group has more than {_MAX_MEMBERS} members")
    return evidence


class EvidenceReader:
    """Reads many nodes' evidence, and stores equal parts only once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._stacks = 0

    def read(self, data: bytes) -> NodeEvidence:
        """Like `decode_evidence`."""
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
