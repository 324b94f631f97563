"""The stores in Python and C behave the same, whatever arrives and however it is split."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rallypoint.base.endpoint import listening_socket
from tests import typed_requests as wire
from tests.effort import examples
from tests.unit.store.both import KINDS, RETRY, Bench, Peer, bench, is_compiled, logged, no_more_descriptors
from tests.unit.store.requests import NAMES, REQUESTS, STEPS, WAITING_STEPS, stream

compiled = pytest.mark.skipif(not is_compiled(), reason="the store in C was not built")
both = pytest.mark.parametrize("kind", [pytest.param(kind, marks=[compiled] * (kind != "python")) for kind in KINDS])


def played(kind: str, steps: Sequence[tuple[str, wire.Request | None]]) -> list[bytes]:
    """What all clients have received after each step; with None, a client leaves and another takes its place."""
    seen = []
    with bench(kind) as it, logged():
        peers = {name: it.connect() for name in NAMES}
        for client, request in steps:
            if request is None or peers[client].closed:
                peers[client].far.close()
                it.turn()
                peers[client] = it.connect()
            else:
                it.send(peers[client], wire.encode(request))
            received = [peer.received() + b"closed" * peer.closed for peer in peers.values()]
            seen += [bytes(sorted(data)) if isinstance(request, wire.ListKeys) else data for data in received]
    return seen


K, L, PUSH = wire.Wait([b"k"]), wire.Wait([b"l"]), wire.QueuePush(b"k", b"")


# The surprising rows of contract section 9.3
@compiled
@example([("A", K), ("B", wire.CompareSet(b"k", b"x", b"y")), ("B", wire.Check([b"k"]))])
@example([("A", wire.Wait([b"k", b"l"])), ("B", K), ("C", K), ("A", PUSH), ("A", wire.Set(b"l", b"")), ("A", PUSH)])
@example([("B", PUSH), ("A", wire.Wait([b"k", b"l"])), ("B", wire.Set(b"l", b"")), ("B", PUSH)])
@example([("C", K), *[(name, wire.Barrier(b"k", 2)) for name in "ABA"], ("A", wire.Get(b"k"))])
@example([("A", K), ("A", L), ("B", wire.Barrier(b"l", 1)), ("B", wire.Set(b"k", b""))])
@example([("A", K), ("A", wire.Barrier(b"l", 2)), ("B", wire.Barrier(b"l", 1)), ("B", wire.Set(b"k", b""))])
@given(steps=st.one_of(STEPS, WAITING_STEPS))
@settings(max_examples=examples(200), deadline=None)
def test_both_stores_give_the_same_replies(steps: Sequence[tuple[str, wire.Request | None]]) -> None:
    assert played("compiled", steps) == played("python", steps)


Step = tuple[int, bytes]


def outcome(kind: str, pieces: Sequence[Step]) -> tuple[list[bytes], list[bool], list[str]]:
    """Replies to three clients that send these pieces in turn, whether they were closed, and the log lines."""
    with bench(kind) as it, logged() as lines:
        peers = [it.connect(greet=False) for _ in range(3)]
        received = [b""] * 3
        for who, piece in pieces:
            it.send(peers[who], piece)
            received = [data + peer.received() for data, peer in zip(received, peers, strict=True)]
        return received, [peer.closed for peer in peers], lines


@st.composite
def streams(draw: st.DrawFn) -> list[Step]:
    """Pieces of three clients' streams, some of them damaged."""
    pieces: list[list[Step]] = []
    for who in range(3):
        sent = draw(st.lists(REQUESTS.filter(lambda request: not isinstance(request, wire.ListKeys)), max_size=10))
        whole = bytearray(stream(sent))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
            whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
        cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
        ends = zip([0, *cuts], [*cuts, len(whole)], strict=True)
        pieces.append([(who, bytes(whole[start:end])) for start, end in ends if start < end])
    order = draw(st.permutations([who for who, mine in enumerate(pieces) for _ in mine]))
    return [pieces[who].pop(0) for who in order]


def of(who: int, *requests: wire.Request) -> Step:
    """A greeting and requests in one piece."""
    return who, b"".join(map(wire.encode, (wire.Validate(), *requests)))


WAITS, QUEUES = wire.Wait([b"q"]), (wire.QueuePush(b"q", b"1"), wire.QueuePop(b"q"))


@compiled
@example([of(0, WAITS), of(1, WAITS), of(2, wire.QueuePush(b"q", b""))])
@example([of(0, wire.Set(b"q", b""), *QUEUES, *QUEUES, wire.QueueLen(b"q"))])
@example([of(0, wire.Set(b"n", b"9223372036854775807"), wire.Add(b"n", 0))])
@example([of(0, wire.Set(b"n", b"9223372036854775808"), wire.Add(b"n", 0))])
@given(pieces=streams())
@settings(max_examples=examples(150), deadline=None)
def test_both_stores_react_the_same_to_damaged_streams(pieces: list[Step]) -> None:
    expected, ours = outcome("python", pieces), outcome("compiled", pieces)
    if any(b"\x11" in piece for _, piece in pieces):  # damage can make a LIST_KEYS, which has no order
        expected = [bytes(sorted(data)) for data in expected[0]], *expected[1:]
        ours = [bytes(sorted(data)) for data in ours[0]], *ours[1:]
    assert ours == expected


@both
@given(sent=st.lists(REQUESTS, min_size=1, max_size=6), data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_slow_readers_get_all_replies(kind: str, sent: list[wire.Request], data: st.DataObject) -> None:

    size = data.draw(st.sampled_from([10, 5_000, 70_000, 300_000]))
    requests: list[wire.Request] = [wire.Set(b"a", bytes(size)), wire.Append(b"b", b"b" * size)]
    for request in sent:
        fine = not isinstance(request, wire.Add | wire.Barrier | wire.ListKeys)
        requests += [request] * fine + [wire.Get(b"a"), wire.Append(b"b", b"x"), wire.MultiGet([b"b", b"a", b"b"])]
    whole = b"".join(map(wire.encode, requests)) + wire.encode(wire.Ping(0xFEDCBA98))
    with bench(kind) as it:
        expected = taken(it, it.connect(), whole, 1 << 30)
    with bench(kind) as it:
        found = taken(it, it.connect(buffer=4096), whole, data.draw(st.sampled_from([100_000, 1_000_000])))
    assert found == expected


def taken(it: Bench, peer: Peer, whole: bytes, most: int) -> bytes:
    """Send as much as possible, then read at most `most` bytes, until the last reply has come."""
    replies = b""
    while not replies.endswith(b"\x98\xba\xdc\xfe"):
        if whole:
            with suppress(BlockingIOError):
                whole = whole[peer.far.send(whole[:50_000]) :]
        it.turn()
        replies += peer.received(most)
        assert not peer.closed
    return replies


@both
def test_many_keys_arrive_in_linear_time(kind: str) -> None:
    """A request of 100,000 keys in small pieces would take minutes in quadratic time."""
    keys = [b"%08d" % number for number in range(100_000)]
    whole = wire.encode(wire.Check(keys))
    with bench(kind) as it:
        peer = it.connect()
        for start in range(0, len(whole), 600):
            it.send(peer, whole[start : start + 600])
        assert peer.received() == wire.MISSING


@both
def test_clients_that_left_while_waiting_are_forgotten(kind: str) -> None:
    """Clients wait for 1,000 keys, send a request and leave, then the keys are set."""
    keys = [b"%d" % number for number in range(1000)]
    with bench(kind) as it:
        other = it.connect()
        for _ in range(20):
            gone = it.connect()
            it.send(gone, wire.encode(wire.Wait(keys)))
            gone.far.send(wire.encode(wire.Get(b"none")))
            gone.far.close()
            it.send(other, b"".join(wire.encode(wire.Set(key, b"")) for key in keys))
            it.send(other, b"".join(wire.encode(wire.DeleteKey(key)) for key in keys))
            assert other.received() == wire.I64.pack(1) * 1000
        it.send(other, wire.encode(wire.NumKeys()))
        assert other.received() == wire.I64.pack(0)


@both
def test_connections_that_a_forked_process_shares_are_closed(kind: str) -> None:
    """A worker forked from the agent keeps its sockets open: an epoll set would still report them."""
    with bench(kind) as it:
        before = watched(it)
        peer = it.connect()
        copies = [os.dup(descriptor) for descriptor in watched(it) - before]
        assert len(copies) == 1
        it.send(peer, b"\xff")
        assert peer.received() == b""
        assert watched(it) == before
        peer.far.close()
        it.turn()
        os.close(copies[0])


def watched(it: Bench) -> set[int]:
    """The descriptors in the store's epoll set: the one with its eventfd."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError), open(f"/proc/self/fdinfo/{descriptor}") as lines:
            found = {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
            if it.wake in found:
                return found
    raise AssertionError("the store has no epoll set")


@both
def test_changes_do_not_affect_values_being_sent(kind: str) -> None:
    value = os.urandom(2_000_000)
    with bench(kind) as it:
        slow, other = it.connect(buffer=4096), it.connect()
        it.send(other, wire.encode(wire.Set(b"k", value)))
        it.send(slow, wire.encode(wire.Get(b"k")))
        changes = (wire.Append(b"k", b"x" * 3_000_000), wire.Set(b"k", bytes(2_000_000)), wire.DeleteKey(b"k"))
        for change in changes:
            it.send(other, wire.encode(change))
        assert read(it, slow, len(value) + 8) == wire.string(value)


def read(it: Bench, peer: Peer, size: int) -> bytes:
    """Read exactly `size` bytes while the store works."""
    found = b""
    while len(found) < size:
        it.transport.run_once()
        found += peer.received(size - len(found))
        assert not peer.closed
    return found


@both
def test_without_descriptors_the_store_retries(kind: str) -> None:
    with bench(kind) as it, logged() as lines, ExitStack() as clients:
        connected = [clients.enter_context(socket.create_connection(("127.0.0.1", it.port), 30)) for _ in range(3)]
        with no_more_descriptors():
            it.turn()
        (line,) = lines
        assert line.startswith(
            f"WARNING: the store will not accept connections for {RETRY:g} s: {os.strerror(errno.EMFILE)} (some of the "
        )
        assert line.endswith("are reserved for the agent); raise the hard limit (`ulimit -Hn`)")
        for client in connected:
            client.sendall(wire.encode(wire.Validate()) + wire.encode(wire.Ping(3)))
        before = watched(it)
        while len(watched(it)) < len(before) + 1 + len(connected):  # the listening socket and the clients
            it.turn()
        it.turn()
        for client in connected:
            assert client.recv(4) == b"\3\0\0\0"


@compiled
def test_native_sockets_cannot_be_used_after_close() -> None:
    from rallypoint.store._native import Sockets

    with listening_socket("127.0.0.1", 0) as listener, ExitStack() as stack:
        wake = os.eventfd(0)
        stack.callback(os.close, wake)
        limits = 1.0, 1.0, 0, 1, 1, 1, 1
        sockets = Sockets(listener.fileno(), wake, 100, limits, lambda *_: None, lambda _: 100, None)
        assert sockets.connections() == 0
        sockets.close()
        sockets.close()
        for use in (sockets.serve, sockets.run_once, lambda: sockets.add_connection(0, b"")):
            with pytest.raises(RuntimeError, match="closed"):
                use()
        sockets.release_memory()
        sockets.release_memory()
        with pytest.raises(OSError, match="Bad file descriptor"):
            Sockets(-1, -1, 100, limits, lambda *_: None, lambda _: 100, None)
