"""Time slices of the store in C, and the guard's limits of both stores."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import build_native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.store.transport import StoreGuard
from tests import typed_requests as wire
from tests.effort import examples
from tests.processes import resident
from tests.unit.store.both import Bench, Peer, bench, is_compiled, logged
from tests.unit.store.requests import STEPS, WAITING_STEPS
from tests.unit.store.test_both import both, compiled, played, read

Herd: TypeAlias = tuple[Bench, list[Peer], Peer]
MANY = [b"/key/%06d" % number for number in range(50_000)]
STRANGE = [b"/none/%06d" % number for number in range(50_000)]


def names(reply: bytes) -> list[bytes]:
    """The keys in a reply to LIST_KEYS."""
    (count,) = struct.unpack_from("<Q", reply)
    found, at = [], 8
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", reply, at)
        found.append(reply[at + 8 : at + 8 + size])
        at += 8 + size
    assert at == len(reply)
    return found


def fill(it: Bench, keys: list[bytes], value: bytes = b"") -> None:
    setter = it.connect()
    for start in range(0, len(keys), 1000):
        it.send(setter, b"".join(wire.encode(wire.Set(key, value)) for key in keys[start : start + 1000]))
    it.send(setter, wire.encode(wire.Ping(1)))
    assert setter.received() == b"\1\0\0\0"


def hand_in(it: Bench, peer: Peer, data: bytes) -> None:
    """Send all of it, with as few turns as possible."""
    while data:
        try:
            data = data[peer.far.send(data) :]
        except BlockingIOError:
            it.transport.run_once()


@pytest.fixture(scope="module", name="filled")
def _filled() -> Iterator[Bench]:

    if not is_compiled():
        pytest.skip("the store in C was not built")
    with bench("compiled") as it:
        fill(it, MANY)
        yield it


@pytest.mark.parametrize("request_", [wire.Check(MANY), wire.Wait(MANY)], ids=["check", "wait"])
def test_requests_with_many_keys_do_not_block_others(filled: Bench, request_: wire.Request) -> None:
    slow, other = filled.connect(), filled.connect()
    hand_in(filled, slow, wire.encode(request_))
    served = 0
    while not (reply := slow.received()):
        other.far.send(wire.encode(wire.Ping(9)))
        filled.transport.run_once()
        served += other.received() == b"\x09\0\0\0"
    assert reply == wire.DONE
    assert served >= 5


def test_a_wait_for_many_keys_ends_with_the_last_key(filled: Bench) -> None:
    """The first and last keys arrive while the store still registers the wait; some keys are repeated."""
    keys = [b"/wanted/%d" % number for number in range(10_000)]
    slow, other = filled.connect(), filled.connect()
    hand_in(filled, slow, wire.encode(wire.Wait([*keys, *keys[:100]])))
    for key in [*keys[:20], *keys[-20:], *keys[20:-21]]:
        other.far.send(wire.encode(wire.Set(key, b"")))
        filled.transport.run_once()
    filled.turn()
    assert slow.received() == b""
    filled.send(other, wire.encode(wire.Set(keys[-21], b"")) + b"".join(wire.encode(wire.DeleteKey(k)) for k in keys))
    assert slow.received() == wire.DONE
    assert read(filled, other, 8 * len(keys)) == wire.I64.pack(1) * len(keys)


def test_a_cancelled_wait_for_many_keys_has_no_effect(filled: Bench) -> None:
    slow, other = filled.connect(), filled.connect()
    filled.send(slow, wire.encode(wire.Wait(STRANGE)) + wire.encode(wire.CancelWait()))
    assert slow.received() == wire.CANCELLED
    filled.send(slow, wire.encode(wire.Wait([STRANGE[0], STRANGE[-1]])))
    filled.send(other, wire.encode(wire.Set(STRANGE[0], b"")) + wire.encode(wire.Set(STRANGE[1], b"")))
    assert slow.received() == b""
    filled.send(other, wire.encode(wire.Set(STRANGE[-1], b"")))
    assert slow.received() == wire.DONE
    filled.send(other, b"".join(wire.encode(wire.DeleteKey(key)) for key in (*STRANGE[:2], STRANGE[-1])))
    assert other.received() == wire.I64.pack(1) * 3


@pytest.fixture(scope="module", name="small_slices")
def _small_slices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build the store in C with slices of four steps, and use it."""
    if not is_compiled():
        pytest.skip("the store in C was not built")
    name = "rallypoint.store._native"
    target = tmp_path_factory.mktemp("slices") / "_native.abi3.so"
    try:
        path = str(build_native.build(target, "-O0", "-DSTORE_SLICE=4"))
    except build_native.NotBuiltError as error:
        pytest.skip(str(error))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rallypoint.store.compiled._native", module)
        yield


@pytest.mark.process
@pytest.mark.usefixtures("small_slices")
@given(steps=st.one_of(STEPS, WAITING_STEPS))
@settings(max_examples=examples(200), deadline=None)
def test_small_slices_give_the_same_replies(steps: Sequence[tuple[str, wire.Request | None]]) -> None:
    assert played("compiled", steps) == played("python", steps)


@pytest.fixture(name="herd")
def _herd(small_slices: None) -> Iterator[Herd]:
    """A store, more clients waiting for one key than wake in a few turns, and another client."""
    with bench("compiled") as it:
        waiting = [it.connect() for _ in range(40)]
        for peer in waiting:
            it.send(peer, wire.encode(wire.Wait([b"k"])))
        yield it, waiting, it.connect()


@pytest.mark.process
def test_waiting_clients_wake_in_slices(herd: Herd) -> None:
    """All wake although the key is deleted soon and some clients leave; a later client does not."""
    it, waiting, other = herd
    late = it.connect()
    hand_over(it, other, wire.Set(b"k", b""))
    hand_over(it, other, wire.DeleteKey(b"k"))
    assert other.received() == wire.I64.pack(1)
    hand_over(it, late, wire.Wait([b"k"]))
    for peer in waiting[::7]:
        peer.far.close()
    staying = [peer for number, peer in enumerate(waiting) if number % 7]
    replies = [peer.received() for peer in staying]
    assert replies.count(b"") > 10
    it.turn()
    assert {reply + peer.received() for reply, peer in zip(replies, staying, strict=True)} == {wire.DONE}
    assert late.received() == b""
    it.send(other, wire.encode(wire.Set(b"k", b"")))
    assert late.received() == wire.DONE


def hand_over(it: Bench, peer: Peer, *requests: wire.Request) -> None:
    """Send requests and give the store one turn."""
    peer.far.send(b"".join(map(wire.encode, requests)))
    it.transport.run_once()


SET = wire.Set(b"k", b"7")


@pytest.mark.process
@pytest.mark.parametrize(
    ("first", "requests", "replies"),
    [
        ([SET], [wire.Get(b"k"), wire.CancelWait()], wire.string(b"7") + wire.CANCELLED),
        ([SET], [wire.Wait([b"k"]), wire.Get(b"k")], wire.DONE + wire.string(b"7")),
        ([], [wire.Add(b"k", 7), wire.Add(b"k", 1)], wire.I64.pack(7) + wire.I64.pack(8)),
    ],
    ids=["cancel", "wait", "add"],
)
def test_a_wait_is_answered_before_later_requests(
    herd: Herd, first: list[wire.Request], requests: list[wire.Request], replies: bytes
) -> None:
    it, waiting, other = herd
    if first:
        hand_over(it, other, *first)
    hand_over(it, waiting[-1], *requests)
    assert waiting[-2].received() == b""
    it.turn()
    assert waiting[-1].received() == wire.DONE + replies
    assert {peer.received() for peer in waiting[:-1]} == {wire.DONE}


LONG = st.integers(0, 30).map(lambda number: b"%02d" % number * 300)
CHANGES = st.one_of(
    st.builds(wire.Set, LONG, st.just(b"value")),
    st.builds(wire.DeleteKey, LONG),
    st.builds(wire.Add, LONG.map(lambda key: key + b"n"), st.just(1)),
    st.builds(wire.Append, LONG, st.just(b"more")),
    st.builds(wire.QueuePush, LONG, st.just(b"")),
)


@both
@given(steps=st.lists(st.one_of(CHANGES, st.integers(0, 2), st.integers(3, 5)), min_size=10, max_size=120))
@settings(max_examples=examples(60), deadline=None)
def test_a_list_is_a_snapshot(kind: str, steps: list[wire.Request | int]) -> None:
    """Three clients read lists piece by piece while keys are added and deleted."""
    with bench(kind) as it:
        fill(it, [b"%02d" % number * 300 for number in range(0, 30, 2)])
        other = it.connect()
        peers = [it.connect(buffer=4096) for _ in range(3)]
        present = {b"%02d" % number * 300 for number in range(0, 30, 2)}
        expected: list[list[set[bytes]]] = [[], [], []]
        received = [b"", b"", b""]
        for step in steps:
            match step:
                case int(who) if who < 3 and not expected[who]:
                    it.send(peers[who], wire.encode(wire.ListKeys()))
                    expected[who].append(set(present))
                case int(who):
                    received[who % 3] += peers[who % 3].received(3000)
                    it.turn()
                case wire.DeleteKey(key):
                    it.send(other, wire.encode(step))
                    present.discard(key)
                case wire.Set(key, _) | wire.Add(key, _) | wire.Append(key, _):
                    it.send(other, wire.encode(step))
                    present.add(key)
                case _:
                    it.send(other, wire.encode(step))
            other.received()
        for peer, wanted, found in zip(peers, expected, map(bytearray, received), strict=True):
            it.send(peer, wire.encode(wire.Ping(7)))
            while not found.endswith(b"\7\0\0\0"):
                it.turn()
                found.extend(peer.received())
            lists = [names(bytes(found[:-4]))] if wanted else []
            assert [sorted(keys) for keys in lists] == [sorted(keys) for keys in wanted]


@compiled
def test_an_unread_multi_get_needs_little_memory() -> None:
    """A request of one megabyte with a reply of two gigabytes."""
    with bench("compiled") as it:
        other, slow = it.connect(), it.connect(buffer=4096)
        value = os.urandom(16_000)
        it.send(other, wire.encode(wire.Set(b"k", value)))
        before = resident()
        it.send(slow, wire.encode(wire.MultiGet([b"k"] * wire.MAX_KEYS)))
        assert resident() - before < 20_000_000
        for _ in range(20):
            assert read(it, slow, 16_008) == wire.string(value)
        it.send(other, wire.encode(wire.Ping(3)))
        assert other.received() == b"\3\0\0\0"


# The guard's limits


def refused(it: Bench, sent: bytes, lines: list[str]) -> str:
    """Send data that closes the connection, and return the logged reason."""
    peer = it.connect()
    hand_in(it, peer, sent)
    while not peer.closed:
        it.turn()
        peer.received()
    (line,) = lines
    lines.clear()
    prefix = "WARNING: the store is closing the connection from a client that has left: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)


@both
def test_limits_close_only_their_connection(kind: str) -> None:
    guard = StoreGuard(request=10_000, value=5000)
    with bench(kind, guard) as it, logged() as lines:
        other = it.connect()
        it.send(other, wire.encode(wire.Check([b"k" * 90] * 101)))
        assert other.received() == wire.MISSING, "it arrived at once"
        long = wire.encode(wire.Check([b"k" * 992] * 20))
        reason = refused(it, long[:9500], lines)
        assert reason == "a request of 10009 bytes or more is too long; this store allows 10000"
        grown = wire.encode(wire.Set(b"v", bytes(4000))) + wire.encode(wire.Append(b"v", bytes(1001)))
        assert refused(it, grown, lines) == "a value would grow to 5001 bytes; this store allows 5000"
        it.send(other, wire.encode(wire.Get(b"v")))
        assert other.received() == wire.string(bytes(4000))


@compiled
def test_limits_of_one_connection() -> None:
    with bench("compiled", StoreGuard(keys=10, bytes=20_000)) as it, logged() as lines:
        peer = it.connect()
        for number in range(100):  # deleted keys do not count
            key = b"%d" % number
            steps: list[wire.Request] = [wire.Set(key, bytes(300)), wire.Set(key, bytes(400)), wire.DeleteKey(key)]
            for step in (*steps, wire.QueuePush(key, bytes(300)), wire.QueuePop(key)):
                it.send(peer, wire.encode(step))
            assert len(peer.received()) == 8 + 16 + 300
        assert lines == []
        eleven = b"".join(wire.encode(wire.Set(b"%d" % number, b"")) for number in range(11))
        wanted = "it has added 11 keys and deleted too few; this store allows 10 per connection"
        assert refused(it, eleven, lines) == wanted
        large = b"".join(wire.encode(wire.QueuePush(b"q", bytes(4000))) for _ in range(5))
        wanted = f"it has added {5 * 4064 + 65} bytes and deleted too few; this store allows 20000 per connection"
        assert refused(it, large, lines) == wanted


@both
def test_clients_without_a_greeting_are_closed(kind: str) -> None:
    with bench(kind, StoreGuard(validate_timeout=0.05)) as it, logged() as lines:
        polite, silent, slow = it.connect(), it.connect(greet=False), it.connect(greet=False)
        it.send(slow, wire.encode(wire.Validate())[:3])
        while not silent.closed or not slow.closed:
            it.turn()
            silent.received()
            slow.received()
        it.send(polite, wire.encode(wire.Ping(1)))
        assert polite.received() == b"\1\0\0\0"
    assert len(lines) == 2
    assert lines[0].endswith("it did not send a greeting within 0.05 s, so it is not a store client")


@both
def test_the_limit_of_connections(kind: str) -> None:
    with bench(kind, StoreGuard(connections=2)) as it, logged() as lines:
        clients = [socket.create_connection(("127.0.0.1", it.port), 30) for _ in range(4)]
        for client in clients:
            client.sendall(wire.encode(wire.Validate()) + wire.encode(wire.Ping(7)))
        it.turn()
        assert [answered(client) for client in clients] == [True, True, False, False]
        clients[0].close()
        clients[1].close()
        while not answered(clients[2]) or not answered(clients[3]):
            it.turn()
        for client in clients:
            client.close()
    assert lines[0] == (
        "WARNING: the store will not accept more connections until others close: it has reached its maximum of 2"
    )


def answered(client: socket.socket) -> bool:
    """Whether the reply to the ping has arrived."""
    client.setblocking(False)
    try:
        return client.recv(4, socket.MSG_PEEK) == b"\7\0\0\0"
    except BlockingIOError:
        return False


@both
def test_peers(kind: str) -> None:
    with bench(kind, StoreGuard(peers=["127.0.0.2", "127.1.0.0/16"])) as it, logged() as lines:
        addresses = ["127.0.0.1", "127.0.0.2", "127.1.9.9", "127.2.0.0"]
        assert [allowed(it, address) for address in addresses] == [False, True, True, False]
        assert "its address is not one of those that may use this store (127.0.0.2, 127.1.0.0/16); if" in lines[0]
        outsider, member = connected(it, "127.0.0.2"), connected(it, "127.1.9.9")
        it.transport.set_peers(["127.0.0.1", "127.1.9.9"])
        assert [allowed(it, address) for address in addresses] == [True, False, True, False]
        it.turn()
        assert outsider.recv(1) == b""
        assert alive(it, member)
        it.transport.set_peers([])
        assert not allowed(it, "127.0.0.1")
        assert (
            "may use this store (there are none); if it belongs to the job, add its network to --store-peers"
            in lines[-1]
        )
        it.transport.set_peers([f"127.3.{number // 250}.{number % 250}" for number in reversed(range(2000))])
        assert [allowed(it, address) for address in ("127.3.0.0", "127.3.7.249", "127.3.8.0")] == [True, True, False]
        it.transport.set_peers(None)
        assert allowed(it, "127.2.0.0")
        outsider.close()
        member.close()


def connected(it: Bench, address: str) -> socket.socket:
    """A client with this address of the loopback network."""
    client = socket.create_connection(("127.0.0.1", it.port), 30, (address, 0))
    it.turn()
    return client


def alive(it: Bench, client: socket.socket) -> bool:
    """Whether a client is served."""
    try:
        client.sendall(wire.encode(wire.Validate()) + wire.encode(wire.Ping(7)))
        it.turn()
        return client.recv(4) == b"\7\0\0\0"
    except (ConnectionResetError, BrokenPipeError):
        return False


def allowed(it: Bench, address: str) -> bool:
    """Whether a client with this address is served."""
    with connected(it, address) as client:
        return alive(it, client)


@both
def test_keepalive(kind: str) -> None:
    with bench(kind, StoreGuard(keepalive=(77, 7, 3))) as it, connected(it, "127.0.0.1"):
        found = []
        for descriptor in os.listdir("/proc/self/fd"):
            if not os.path.realpath(f"/proc/self/fd/{descriptor}").rpartition("/")[2].startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as other:
                if other.family == socket.AF_INET and other.getsockname()[1] == it.port:
                    options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
                    found.append([other.getsockopt(socket.IPPROTO_TCP, option) for option in options])
                    assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert found == [[77, 7, 3]] * 2, "the listening socket and the connection"
