"""The dumps of torch's flight recorder, as JSON: the answer of torch's worker server, or the result of `unpickle`.

Pure. Law: what is of another form is an error, and what is not needed is not looked at: torch adds fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from rallypoint.base.log import printable
from rallypoint.hangs.frames import MAX_FILE, MAX_NAME, Frame, calls_of, place_of
from rallypoint.hangs.messages import MAX_GROUPS, MAX_KEPT, MAX_TEXT, Collective, GroupRecord, RankRecord

MAX_DUMP = 64 * 1024 * 1024
"""Bytes of a dump that is read; one of 2,000 entries with stacks has about a million."""
_RANKS = re.compile(r"\[((?:\d{1,9}(?:, ?\d{1,9})*)?)\]")


class DumpedFrame(msgspec.Struct):
    """A call, the innermost first."""

    name: str
    filename: str
    line: Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


class DumpedEntry(msgspec.Struct):
    """One operation of a process group, which is known by its name and its description."""

    process_group: tuple[str, str]
    collective_seq_id: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    profiling_name: str
    state: str = ""
    retired: bool = False
    is_p2p: bool = False
    frames: list[DumpedFrame] = []

    @property
    def operation(self) -> str:
        """Its name without the backend's."""
        return printable(self.profiling_name.partition(":")[2] or self.profiling_name, 100)

    @property
    def done(self) -> bool:
        """Whether it is complete. Of gloo the state is never moved on; what is complete is retired. With NCCL that is
        so of what has timed out too."""
        return self.retired if self.profiling_name.startswith("gloo:") else self.state == "completed"

    @property
    def place(self) -> str:
        """Where in the user's code it was called; empty where that is not told."""
        frames = [
            Frame(printable(each.name[-MAX_NAME:]), printable(each.filename[-MAX_FILE:], MAX_FILE), each.line)
            for each in self.frames
        ]
        return place_of(calls_of(frames))[:MAX_TEXT]


class DumpedGroup(msgspec.Struct):
    """A process group; the ranks are a list in brackets, empty with gloo."""

    name: str
    desc: str
    ranks: str


class Dump(msgspec.Struct):
    """A whole dump, with what is needed of it."""

    entries: list[DumpedEntry]
    pg_config: dict[str, DumpedGroup] = {}


_json = msgspec.json.Decoder(Dump)


def read_dump(data: bytes) -> Dump:
    """The dump in this JSON.

    Raises:
        ValueError: it is no whole dump, or holds what no dump has.
    """
    if len(data) > MAX_DUMP:
        raise ValueError(f"it has more than {MAX_DUMP} bytes")
    try:
        return _json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no dump of a flight recorder: {error}") from None


def record_of(rank: int, dump: Dump) -> RankRecord:
    """What is needed of one rank's dump: the last collectives of each process group, and what it sends and receives."""
    members = _members(dump.pg_config)
    groups: dict[tuple[str, str], dict[int, DumpedEntry]] = {}
    for entry in dump.entries:
        if not entry.is_p2p and (entry.process_group in groups or len(groups) < MAX_GROUPS):
            # Of what was coalesced under one number, the last entry stays.
            groups.setdefault(entry.process_group, {})[entry.collective_seq_id] = entry
    pending = [each for each in dump.entries if each.is_p2p and not each.done][-MAX_KEPT:]
    return RankRecord(
        rank,
        tuple(
            GroupRecord(
                printable(name[0], MAX_TEXT),
                printable(name[1], MAX_TEXT),
                members.get(name, ()),
                tuple(_collective(found[number]) for number in sorted(found)[-MAX_KEPT:]),
            )
            for name, found in groups.items()
        ),
        tuple(printable(f"{each.operation} of {title(*each.process_group)}", MAX_TEXT) for each in pending),
    )


def title(name: str, description: str) -> str:
    """The readable name of a process group."""
    return description if description not in ("", "undefined") else f"process group {name}"


def _collective(entry: DumpedEntry) -> Collective:
    return Collective(entry.collective_seq_id, entry.operation, entry.done, entry.place)


def _members(config: Mapping[str, DumpedGroup]) -> dict[tuple[str, str], tuple[int, ...]]:
    """The ranks of each process group, by its name and description, where they are told."""
    found = {}
    for each in config.values():
        listed = _RANKS.fullmatch(each.ranks)
        if listed is not None and listed[1]:
            found[each.name, each.desc] = tuple(sorted({int(number) for number in listed[1].split(",")}))
    return found
