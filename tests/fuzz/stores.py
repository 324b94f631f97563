"""Targets for the worker store: C beside Python, and what clients and files receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from rallypoint.base.errors import UserError
from rallypoint.store import api, filestore
from rallypoint.store.api import Receive
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.filestore import FileStore
from rallypoint.store.plain import Decoder
from rallypoint.store.transport import StoreGuard, network, networks
from tests import typed_requests as wire
from tests.fuzz.target import Target, no_errors
from tests.unit.store.both import KINDS, bench, is_compiled

_GREETING = wire.encode(wire.Validate())
_CLIENTS = 3
_GUARD = StoreGuard(request=100_000, value=100_000, keys=1000, bytes=1_000_000)

Pieces = Sequence[tuple[int, bytes]]
"""Who sends, and what."""


def _played(kind: str, pieces: Pieces) -> tuple[list[bytes], list[bool]]:
    """What clients of a new store get who send this in turn, and which are closed."""
    with bench(kind, _GUARD) as it:
        peers = [it.connect(greet=False) for _ in range(_CLIENTS)]
        received = [b""] * _CLIENTS
        for who, piece in pieces:
            it.send(peers[who], piece)
            received = [data + peer.received() for data, peer in zip(received, peers, strict=True)]
        return received, [peer.closed for peer in peers]


@cache
def kinds() -> list[str]:
    """The store in Python, and the one in C if it was built."""
    return KINDS if is_compiled() else KINDS[:1]


def twins(data: bytes) -> None:
    """Both stores give the same replies to the same pieces, and one client gets the same in whatever pieces it sends.

    Who sends, how much, and what: so the input is read, after a byte for the size of the pieces.
    """
    step = data[0] % 40 + 1 if data else 1
    pieces: list[tuple[int, bytes]] = []
    at = 1
    while at + 1 < len(data):
        who, size = data[at] % _CLIENTS, data[at + 1]
        pieces.append((who, data[at + 2 : at + 2 + size]))
        at += 2 + size
    pieces = [(who, _GREETING) for who in range(_CLIENTS - 1)] + pieces  # the last one has to greet by itself
    alone = b"".join(piece for who, piece in pieces if who == 0)
    step = max(step, len(alone) // 24)
    cut = [(0, alone[at : at + step]) for at in range(0, len(alone), step)]
    with no_errors():
        for each in (pieces, cut):
            _alike([_played(kind, each) for kind in kinds()], each)
        _alike([_played(kind, [(0, alone)]) for kind in kinds()] + [_played(kinds()[0], cut)], cut)


def _alike(outcomes: list[tuple[list[bytes], list[bool]]], pieces: Pieces) -> None:
    """All the same; the keys of a list are in no order, so that of who asks for one only the bytes are compared."""
    lists = [_lists(b"".join(piece for who, piece in pieces if who == client)) for client in range(_CLIENTS)]
    shown = [
        ([bytes(sorted(got)) if listed else got for got, listed in zip(received, lists, strict=True)], closed)
        for received, closed in outcomes
    ]
    assert all(each == shown[0] for each in shown), shown


def _lists(sent: bytes) -> bool:
    decoder = Decoder()
    with suppress(StoreProtocolError):
        decoder.feed(sent)
        while (request := decoder.next()) is not None:
            if request[0] is wire.Op.LIST_KEYS:
                return True
    return False


_EACH: tuple[wire.Request, ...] = (
    *(wire.Set(b"a", b"7"), wire.CompareSet(b"a", b"", b"b"), wire.Get(b"a"), wire.Add(b"a", 1), wire.NumKeys()),
    *(wire.Check([b"a", b"b"]), wire.Wait([b"a", b"b"]), wire.DeleteKey(b"a"), wire.Append(b"a", bytes(60))),
    *(wire.MultiGet([b"a"] * 9), wire.MultiSet([(b"a", b"1"), (b"b", b"2")]), wire.CancelWait(), wire.Ping(1)),
    *(wire.QueuePush(b"a", b"x"), wire.QueuePop(b"a"), wire.QueueLen(b"a"), wire.ListKeys(), wire.Barrier(b"a", 2)),
)


def _twin_seeds() -> Sequence[bytes]:
    made = []
    sets = wire.encode(wire.Set(b"a", b"5"))
    for number, request in enumerate(_EACH):
        one, other = wire.encode(request), wire.encode(_EACH[number - 1])
        parts = [(0, one), (1, sets), (0, other + one), (2, _GREETING + one), (1, one), (2, other)]
        made.append(bytes([number]) + b"".join(bytes([who, len(part)]) + part for who, part in parts))
    return made


def replies(data: bytes) -> None:
    """What a server that is none answers to a client: a value, one error, or the end of what it says."""

    def receive_from(rest: list[bytes]) -> Receive:
        def receive(size: int) -> bytes:
            if size > len(rest[0]):
                raise ConnectionResetError
            got, rest[0] = rest[0][:size], rest[0][size:]
            return got

        return receive

    readers: tuple[Callable[[Receive], object], ...] = (
        *(api.read_number, api.read_value),
        *(api._flag, api._read_queue_pop, api._values),
    )
    for read in readers:
        with suppress(StoreProtocolError, ConnectionResetError):
            read(receive_from([data]))


def files(data: bytes) -> None:
    """A store's file that somebody has damaged: what stands in it, or one error."""
    content: dict[bytes, bytes] = {}
    with suppress(StoreProtocolError):
        filestore.replay(data, content)
        assert sum(map(len, content.values())) <= len(data)
    with NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        with suppress(StoreProtocolError, UserError), FileStore(file.name, -1, timeout=0.01) as store:
            store.check(["a"])
            store.num_keys()


def addresses(data: bytes) -> None:
    """Networks as people write them, and addresses as the kernel shows them."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(UserError):
        assert network(text).bits <= 128
        assert networks([text]) == (network(text),)


TARGETS = {
    "stores": Target(twins, _twin_seeds, ("store/plain.py", "store/compiled.py"), executions=400),
    "store-replies": Target(
        replies,
        lambda: [wire.string(b"abc"), wire.strings([b"a", b"b"]), b"\0", wire.I64.pack(1) + wire.string(b"x")],
        ("store/api.py", "store/client.py"),
    ),
    "store-files": Target(
        files,
        lambda: [filestore.setting(b"a", b"1") + filestore.removing(b"a"), filestore.setting(b"/a", b"")],
        ("store/filestore.py",),
        executions=400,
    ),
    "store-addresses": Target(
        addresses, lambda: [b"10.0.0.1", b"10.0.0.0/8", b"fd00::1", b"fe80::1%eth0", b"::/0"], ("store/transport.py",)
    ),
}
