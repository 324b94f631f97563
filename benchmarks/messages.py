"""What the benchmark and its programs say to one another: one JSON object a line, typed at both ends."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


class Serving(msgspec.Struct, frozen=True):
    """A server's first and only line: the port that the kernel picked."""

    port: int


class Connect(msgspec.Struct, frozen=True):
    """To a load program: connect these clients, in place of those of the last load."""

    port: int
    clients: int
    at_least: int
    """Take at least so many connect latencies, over as many storms of `clients` connects as that needs."""


class Connected(msgspec.Struct, frozen=True):
    """From a load program: its clients are connected and idle. Seconds throughout."""

    latencies: list[float]
    """Of each connect: until the handshake was answered."""
    storms: list[float]
    """From the start of each storm of connects until its last was answered."""


class Drive(msgspec.Struct, frozen=True):
    """To a load program: let every client send requests for so many seconds, after a warm-up."""

    seconds: float
    server_pid: int


class Driven(msgspec.Struct, frozen=True):
    """From a load program: what its clients saw. Seconds throughout."""

    requests: int
    seconds: float
    latencies: list[float]
    """Of round trips; evenly picked where there were very many."""
    server_seconds: float
    """Processor time that the server used meanwhile."""


class Flood(msgspec.Struct, frozen=True):
    """To a flooding program: what it sends, in hexadecimal digits: a greeting, and the message that it repeats, each
    with its frame; from which address, and for how many seconds.
    """

    port: int
    source: str
    greeting: str
    payload: str
    seconds: float


class Flooded(msgspec.Struct, frozen=True):
    """From a flooding program: how many messages it has sent, and whether the server has disconnected."""

    messages: int
    disconnected: bool


class Replay(msgspec.Struct, frozen=True):
    """To a replaying program: say what was recorded, to the store on this port."""

    port: int
    server_pid: int


class Replayed(msgspec.Struct, frozen=True):
    """From a replaying program: all has been said and answered. Seconds throughout."""

    seconds: float
    """From the start of all connects to the last answer."""
    latencies: list[float]
    """Of the round trips that waited for nobody else; evenly picked where there were very many."""
    server_seconds: float
    """Processor time that the server used meanwhile."""


class Meet(msgspec.Struct, frozen=True):
    """To a rendezvous program: make these nodes' handlers; answered by a line `ready`."""

    port: int
    nodes: int
    """For this program alone."""
    all_nodes: int
    run_id: str


class Go(msgspec.Struct, frozen=True):
    """To a rendezvous program: let all its nodes join at this moment of the monotonic clock."""

    at: float


class Met(msgspec.Struct, frozen=True):
    """From a rendezvous program: one entry a node."""

    returned: list[float]
    """When its rendezvous returned, on the monotonic clock."""
    ranks: list[int]
    world_sizes: list[int]


class Gather(msgspec.Struct, frozen=True):
    """To a crowd: these are its nodes; answered by a line `ready`."""

    port: int
    nodes: int
    """For this program alone."""
    first: int
    """Number of this program's first node."""
    all_nodes: int
    run_id: str
    source: str = "127.0.0.1"
    """The address that its nodes connect from: each has its own ports."""
    lease: float = 3.0
    """Seconds of silence after which one of them counts as lost."""


class Gathered(msgspec.Struct, frozen=True):
    """From a crowd: all its nodes have their place."""

    returned: float
    """When the last of them had, on the monotonic clock."""
    ranks: list[int]
    world_sizes: list[int]
    messages: int
    """Said and heard, the handshake's included."""
    bytes: int
    """The same in bytes, without TCP's own."""


class Sustain(msgspec.Struct, frozen=True, tag=True):
    """To a crowd: let all nodes send heartbeats for so many seconds; answered by `Sustained`."""

    seconds: float


class Regroup(msgspec.Struct, frozen=True, tag=True):
    """To a crowd: the round will end, and all nodes meet again in the next one; answered by `Gathered`."""

    fails: bool
    """Whether it is the first of these nodes that ends it, by the failure of a worker."""


class ComeBack(msgspec.Struct, frozen=True, tag=True):
    """To a crowd: all sessions are cut, and all nodes have missed their place; each comes in another connection, and
    is told it again. Answered by `Gathered`.
    """


Order = Sustain | Regroup | ComeBack


class Sustained(msgspec.Struct, frozen=True):
    """From a crowd: how that went."""

    heartbeats: int
    answers: int


WARM_UP = 0.2  # as a share of the measured seconds, before them
_KEPT = 20_000


def thinned(latencies: list[float]) -> list[float]:
    """Evenly picked values, few enough for one line."""
    return latencies[:: max(1, len(latencies) // _KEPT)]


def decode(line: str, kind: type[S]) -> S:
    """Read one line as a `kind`. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return msgspec.json.decode(line, type=kind)


def decode_order(line: str) -> Order:
    """Read one line as any order to a crowd that has gathered. Raises as `decode`."""
    found: Any = msgspec.json.decode(line, type=Order)
    return found  # type: ignore[no-any-return]


def encode(message: msgspec.Struct) -> bytes:
    """The line for a message, without its end."""
    return msgspec.json.encode(message)
