"""Makes the flight recorders of torch's process groups dump, and reads the dumps.

A process can be asked from outside in two ways, both torch's own:

- an NCCL process group checks a named pipe once a second (`TORCH_NCCL_DEBUG_INFO_PIPE_FILE`), and writes a pickle to a
  path with the prefix `TORCH_FR_DUMP_TEMP_FILE`;
- torch's worker server answers on a unix socket (`TORCH_WORKER_SERVER_SOCKET`), also for gloo, if the program has
  started it (`torch.distributed.elastic.control_plane.worker_main`).

Law: never wait for a process beyond the deadline, and only write to a pipe that has a reader.

A dump is JSON: the answer of torch's worker server, or the result of `unpickle`. Any other form is an error. Unknown
fields are ignored, since torch adds fields.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, NamedTuple

import msgspec

from rallypoint.base.clock import Deadline
from rallypoint.base.log import printable
from rallypoint.base.private_files import open_regular, replace_file
from rallypoint.observe.hangs.messages import (
    MAX_GROUPS,
    MAX_KEPT,
    MAX_TEXT,
    Collective,
    GroupRecord,
    RankRange,
    RankRecord,
    runs_of,
    title,
)
from rallypoint.observe.hangs.unpickle import unpickled
from rallypoint.observe.stacks import MAX_FILE, MAX_NAME, Frame, calls_of, place_of

BUFFER = "TORCH_FR_BUFFER_SIZE"
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
DUMP = "TORCH_FR_DUMP_TEMP_FILE"
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
SOCKET = "TORCH_WORKER_SERVER_SOCKET"
OLD_NAMES = {BUFFER: "TORCH_NCCL_TRACE_BUFFER_SIZE", DUMP: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
"""Old names of torch's variables, which it reads if the new ones are not set."""

PER_WORKER = frozenset({DUMP, PIPE, SOCKET})
"""Variables that belong to one start of the workers, or to one worker."""

TIMEOUT = 5.0
"""Seconds for the dumps from all workers on a node."""
_AT_ONCE = 64
"""How many workers to ask at the same time."""
_reading = threading.Semaphore(4)
"""Lock for reading a dump, which can take several hundred megabytes of memory."""
_POLL = 0.05
_REQUEST = b"POST /handler/fr_trace_json HTTP/1.0\r\nHost: worker\r\nContent-Length: 0\r\n\r\n"


class Recorder(NamedTuple):
    """Ways to ask one worker's flight recorder: paths, empty if not possible. `dump` is the file that it writes on a
    request through the pipe.
    """

    dump: str
    pipe: str
    socket: str


def recorder_of(rank: int, environ: Mapping[str, str]) -> Recorder | None:
    """How to ask the flight recorder of a worker with this environment; None if impossible."""
    dump, pipe = environ.get(DUMP) or environ.get(OLD_NAMES[DUMP], ""), environ.get(PIPE, "")
    by_pipe = bool(dump and pipe)
    recorder = Recorder(f"{dump}{rank}" * by_pipe, f"{pipe}{rank}.pipe" * by_pipe, environ.get(SOCKET, ""))
    return recorder if any(recorder) else None


def take_dumps(recorders: Mapping[int, Recorder], folder: str) -> list[RankRecord]:
    """Make all recorders dump concurrently. Save the answers of torch's worker server in `folder`, if set."""
    deadline = Deadline.after(TIMEOUT)
    with ThreadPoolExecutor(max(1, min(len(recorders), _AT_ONCE)), "dumps") as pool:
        return list(pool.map(lambda rank: _dump_of(rank, recorders[rank], folder, deadline), sorted(recorders)))


def _dump_of(rank: int, recorder: Recorder, folder: str, deadline: Deadline) -> RankRecord:
    before = _written(recorder.dump)
    if recorder.pipe and _ask_by_pipe(recorder.pipe):
        return _wait_for_record(rank, recorder.dump, before, deadline)
    if not recorder.socket or not os.path.exists(recorder.socket):
        return RankRecord(rank, why_none="there is neither an NCCL process group nor a torch worker server to ask")
    return _by_socket(rank, recorder.socket, folder, deadline)


def _wait_for_record(rank: int, path: str, seen: tuple[int, int, int], deadline: Deadline) -> RankRecord:
    """The record in the file once it has changed and is complete."""
    why = "wrote no dump"
    while not deadline.expired:
        now = _written(path)
        if now != seen:
            seen = now
            try:
                with _reading, open(open_regular(path), "rb") as file:
                    return record_of(rank, read_dump(unpickled(file, max(0.5, deadline.remaining()))))
            except (OSError, ValueError) as error:
                why = f"wrote an incomplete dump ({error})"
        time.sleep(max(0.0, min(_POLL, deadline.remaining())))
    text = f"its process group was asked, but {why} within {TIMEOUT:g} s"
    return RankRecord(rank, why_none=printable(text, MAX_TEXT))


def _written(path: str) -> tuple[int, int, int]:
    with suppress(OSError):
        seen = os.lstat(path)
        return seen.st_ino, seen.st_mtime_ns, seen.st_size
    return 0, 0, 0


def _ask_by_pipe(path: str) -> bool:
    """Ask through the pipe. Returns whether a process group reads it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # no process group has created it yet, or none is reading it any more
        return False
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1") == 1
    except BlockingIOError:
        return True  # full of unread requests
    except OSError:
        return False
    finally:
        os.close(fd)


def _by_socket(rank: int, path: str, folder: str, deadline: Deadline) -> RankRecord:
    try:
        data = _ask_by_socket(path, deadline)
        record = record_of(rank, read_dump(data))
    except (OSError, ValueError) as error:
        return RankRecord(rank, why_none=printable(f"torch's worker server sent no dump: {error}", MAX_TEXT))
    if folder:
        with suppress(OSError):
            replace_file(os.path.join(folder, f"worker_server_{rank}.json"), data)
    return record


def _ask_by_socket(path: str, deadline: Deadline) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.1, deadline.remaining()))
        connection.connect(path)
        connection.sendall(_REQUEST)
        parts, size = [], 0
        while size <= MAX_DUMP and (part := connection.recv(65536)):
            parts.append(part)
            size += len(part)
            if deadline.expired:
                raise TimeoutError("it takes too long")
            connection.settimeout(max(0.1, deadline.remaining()))
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise ValueError("it does not support the flight recorder")
    return body


# Contents of a dump


MAX_DUMP = 64 * 1024 * 1024
"""Maximum size of a dump in bytes; one with 2,000 entries and stacks has about a million."""
_RANKS = re.compile(r"\[((?:\d{1,9}(?:, ?\d{1,9})*)?)\]")


class DumpedFrame(msgspec.Struct):
    """One call on a stack; the innermost comes first."""

    name: str
    filename: str
    line: Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


class DumpedEntry(msgspec.Struct):
    """One operation of a process group, which is identified by its name and description."""

    process_group: tuple[str, str]
    collective_seq_id: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    profiling_name: str
    state: str = ""
    retired: bool = False
    is_p2p: bool = False
    frames: list[DumpedFrame] = []

    @property
    def operation(self) -> str:
        return printable(self.profiling_name.partition(":")[2] or self.profiling_name, 100)

    @property
    def is_complete(self) -> bool:
        """Whether the operation is complete. gloo never updates the state, but retires complete operations. NCCL also
        retires those that timed out.
        """
        return self.retired if self.profiling_name.startswith("gloo:") else self.state == "completed"

    @property
    def place(self) -> str:
        """Where the user's code called it; empty if unknown."""
        frames = [
            Frame(printable(frame.name[-MAX_NAME:]), printable(frame.filename[-MAX_FILE:], MAX_FILE), frame.line)
            for frame in self.frames
        ]
        return place_of(calls_of(frames))[:MAX_TEXT]


class DumpedGroup(msgspec.Struct):
    """A process group. The ranks are a list in brackets; empty with gloo."""

    name: str
    desc: str
    ranks: str


class Dump(msgspec.Struct):
    entries: list[DumpedEntry]
    pg_config: dict[str, DumpedGroup] = {}


_json = msgspec.json.Decoder(Dump)


def read_dump(data: bytes) -> Dump:
    """Parse a dump. Raises ValueError if it is incomplete or malformed."""
    if len(data) > MAX_DUMP:
        raise ValueError(f"it is larger than {MAX_DUMP} bytes")
    try:
        return _json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not a valid flight recorder dump: {error}") from None


def record_of(rank: int, dump: Dump) -> RankRecord:
    """Extract from one rank's dump the last collectives of each process group, and the sends and receives."""
    members = _members(dump.pg_config)
    groups: dict[tuple[str, str], dict[int, DumpedEntry]] = {}
    for entry in dump.entries:
        if not entry.is_p2p and (entry.process_group in groups or len(groups) < MAX_GROUPS):
            # Of coalesced operations with one number, keep the last entry.
            groups.setdefault(entry.process_group, {})[entry.collective_seq_id] = entry
    pending = [entry for entry in dump.entries if entry.is_p2p and not entry.is_complete][-MAX_KEPT:]
    return RankRecord(
        rank,
        tuple(
            GroupRecord(
                printable(name[0], MAX_TEXT),
                printable(name[1], MAX_TEXT),
                members.get(name, ()),
                tuple(_collective(collectives[number]) for number in sorted(collectives)[-MAX_KEPT:]),
            )
            for name, collectives in groups.items()
        ),
        tuple(printable(f"{entry.operation} of {title(*entry.process_group)}", MAX_TEXT) for entry in pending),
    )


def _collective(entry: DumpedEntry) -> Collective:
    return Collective(entry.collective_seq_id, entry.operation, entry.is_complete, entry.place)


def _members(config: Mapping[str, DumpedGroup]) -> dict[tuple[str, str], tuple[RankRange, ...]]:
    """The known ranks of each process group, by its name and description."""
    members = {}
    for group in config.values():
        listed = _RANKS.fullmatch(group.ranks)
        if listed is not None and listed[1]:
            members[group.name, group.desc] = runs_of(map(int, listed[1].split(",")))
    return members
