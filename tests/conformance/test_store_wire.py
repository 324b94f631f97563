"""The same requests to torch's server and ours, byte for byte, with several clients that wait for each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import typed_requests as wire
from tests.conformance.store_pairs import serving
from tests.effort import examples
from tests.unit.store.both import KINDS
from tests.unit.store.sockets import Raw

pytestmark = pytest.mark.torch
each = pytest.mark.parametrize("ours", KINDS)

KEYS = st.sampled_from([b"a", b"b", b"c"])
VALUES = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"1", b"x" * 100_000]))
NUMBERS = st.sampled_from([b"0", b"-3", b"+5", b"\t 7", b"12abc", b"0x10", b"007", b"9223372036854775807", b"1\x002"])
QUEUES = st.sampled_from([b"q", b"r"])
ALL_KEYS = st.one_of(KEYS, QUEUES)
NUMBER_KEYS = st.sampled_from([b"n", b"m"])

REQUESTS: st.SearchStrategy[wire.Request] = st.one_of(
    st.builds(wire.Set, ALL_KEYS, VALUES),
    st.builds(wire.Set, NUMBER_KEYS, NUMBERS),
    st.builds(wire.CompareSet, KEYS, VALUES, VALUES),
    st.builds(wire.CompareSet, KEYS, st.just(b""), VALUES),
    st.builds(wire.Get, st.one_of(ALL_KEYS, NUMBER_KEYS)),
    st.builds(wire.Add, NUMBER_KEYS, st.integers(-3, 3)),
    st.builds(wire.Add, NUMBER_KEYS, st.integers(-(1 << 63), (1 << 63) - 1)),
    st.builds(wire.Check, st.lists(ALL_KEYS, max_size=3)),
    st.builds(wire.DeleteKey, st.one_of(ALL_KEYS, NUMBER_KEYS)),
    st.builds(wire.Append, ALL_KEYS, VALUES),
    st.builds(wire.MultiGet, st.lists(ALL_KEYS, max_size=3)),
    st.builds(wire.MultiSet, st.lists(st.tuples(ALL_KEYS, VALUES), max_size=3)),
    st.builds(wire.CancelWait),
    st.builds(wire.QueuePush, QUEUES, VALUES),
    st.builds(wire.QueuePop, QUEUES),
    st.builds(wire.QueueLen, QUEUES),
)
# A wait for a queue among other keys is left out: torch's server counts each push to it anew, and so ends a wait for
# one queue and a missing key after two pushes. Ours waits for the key.
WAITS: st.SearchStrategy[wire.Request] = st.one_of(
    st.builds(wire.Wait, st.lists(KEYS, max_size=3)),
    st.builds(wire.Wait, st.tuples(QUEUES).map(list)),
    st.builds(wire.Barrier, NUMBER_KEYS, st.integers(-1, 3)),
)
STEPS = st.lists(st.tuples(st.integers(0, 2), st.one_of(REQUESTS, WAITS)), min_size=1, max_size=25)

names = itertools.count()


def renamed(request: wire.Request, prefix: bytes) -> wire.Request:
    """The same request for keys that no other example uses."""
    fields: list[object] = []
    for name, field in zip(request._fields, request, strict=True):
        if name == "key" and isinstance(field, bytes):
            fields.append(prefix + field)
        elif name == "keys" and isinstance(field, list):
            fields.append([prefix + key for key in field])
        elif name == "pairs" and isinstance(field, list):
            fields.append([(prefix + key, value) for key, value in field])
        else:
            fields.append(field)
    make: Callable[..., wire.Request] = type(request)
    return make(*fields)


class Party:
    """Three clients of one server, and all that they receive after each step."""

    def __init__(self, port: int) -> None:
        self.clients = [Raw(port) for _ in range(3)]

    def step(self, who: int, *requests: wire.Request) -> list[bytes]:
        """One client's requests, and what each client has received when they are done."""
        self.clients[who].send(*requests)
        return [self.received(client) for client in (self.clients[who], *self.clients[:who], *self.clients[who + 1 :])]

    def received(self, client: Raw) -> bytes:
        """What the client gets until the server answers a ping, which is after all else that it is to get now."""
        nonce = b"\xfe\xdc" + (next(names) & 0xFFFF).to_bytes(2, "little")
        client.raw(bytes([wire.Op.PING]) + nonce)
        data = b""
        while not data.endswith(nonce):
            piece = client.socket.recv(1 << 20)
            assert piece, "the server closed the connection"
            data += piece
        return data[:-4]

    def close(self) -> None:
        for client in self.clients:
            client.socket.close()


@pytest.fixture(name="parties", scope="module", params=KINDS)
def _parties(request: pytest.FixtureRequest) -> Iterator[tuple[Party, Party]]:
    with serving("torch") as torchs, serving(request.param) as ours:
        parties = Party(torchs), Party(ours)
        yield parties
        for party in parties:
            party.close()


@given(steps=STEPS)
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_reply_and_wake_up_is_the_same(
    parties: tuple[Party, Party], steps: Sequence[tuple[int, wire.Request]]
) -> None:
    prefix = b"%d/" % next(names)
    for party in parties:
        for who in range(3):
            party.step(who, wire.CancelWait())
    numbers = {prefix + b"n", prefix + b"m"}
    for who, request in steps:
        sent = renamed(request, prefix)
        # A client of theirs or ours never has two waits at once; what torch's server makes of that is no contract.
        before = [wire.CancelWait()] if isinstance(sent, wire.Wait | wire.Barrier) else []
        # Empty text is no number: it would close the connection.
        if isinstance(sent, wire.Append | wire.CompareSet) and sent.key in numbers:
            continue
        theirs, ours = (party.step(who, *before, sent) for party in parties)
        assert ours == theirs, sent


@each
def test_keys_are_counted_and_listed_alike(ours: str) -> None:
    """On fresh servers, for these two commands see the keys of everybody."""
    seen = []
    for kind in ("torch", ours):
        with serving(kind) as port, Raw(port) as client:
            client.send(wire.Set(b"/a", b""), wire.Append(b"init/", b"1"), wire.QueuePush(b"q", b""), wire.NumKeys())
            count = client.receive(8)
            client.send(wire.ListKeys())
            assert client.receive(8) == count
            seen.append((count, {client.value() for _ in range(wire.I64.unpack(count)[0])}))
    assert seen[0] == seen[1]


ONE = (1).to_bytes(8, "little")
VALIDATED = wire.encode(wire.Validate())


@each
@pytest.mark.parametrize(
    "frame",
    [
        VALIDATED * 2,
        VALIDATED + b"\x13",
        VALIDATED + b"\xff",
        VALIDATED + b"\x03" + (8193).to_bytes(8, "little"),
        VALIDATED + b"\x01" + ONE + b"k" + (8388609).to_bytes(8, "little"),
        VALIDATED + b"\x06" + (131073).to_bytes(8, "little"),
        VALIDATED + b"\x0b" + (-1).to_bytes(8, "little", signed=True),
        VALIDATED + wire.encode(wire.Set(b"k", b"abc")) + wire.encode(wire.Add(b"k", 1)),
        VALIDATED + wire.encode(wire.Set(b"k", b"")) + wire.encode(wire.Barrier(b"k", 1)),
        VALIDATED + wire.encode(wire.Set(b"k", b"1" * 20)) + wire.encode(wire.Add(b"k", 1)),
    ],
)
def test_what_torchs_server_closes_for_ours_closes_for_too(frame: bytes, ours: str) -> None:
    for kind in ("torch", ours):
        with serving(kind) as port, Raw(port, greet=False) as client:
            client.raw(frame)
            assert client.closed()


@each
@pytest.mark.parametrize(
    "request_",
    [
        wire.Set(b"k" * 8192, b"v" * 8388608),
        wire.CompareSet(b"k", b"v" * 1_000_000, b"w" * 1_000_000),
        wire.Append(b"", b"v" * 8388608),
        wire.MultiSet([(b"k", b"v")] * 10_000),
        wire.MultiSet([]),
    ],
    ids=lambda request: type(request).__name__,
)
def test_what_torchs_server_takes_ours_takes_too(request_: wire.Request, ours: str) -> None:
    seen = []
    for kind in ("torch", ours):
        with serving(kind) as port, Raw(port) as client:
            client.send(request_)
            if isinstance(request_, wire.CompareSet):
                assert client.value() == request_.expected
            assert client.ping()
            client.send(wire.ListKeys())
            count = wire.I64.unpack(client.receive(8))[0]
            seen.append({client.value() for _ in range(count)})
    assert seen[0] == seen[1]
