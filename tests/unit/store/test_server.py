"""The server over real sockets, with each kind of store, accepting and adopting connections."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import socket
import sys
import threading
from contextlib import ExitStack, suppress

import pytest

from rallypoint.store import server as server_module
from rallypoint.store.plain import PlainTransport
from rallypoint.store.server import STORE_VARIABLE, StoreServer, StoreThread
from tests import typed_requests as wire
from tests.processes import completed, resident
from tests.unit.store.both import choose, no_more_descriptors
from tests.unit.store.conftest import SharedPort
from tests.unit.store.sockets import DEADLINE, Raw
from tests.waiting import until


@pytest.mark.parametrize(
    ("frame", "replies", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"", "not VALIDATE"),
        (wire.encode(wire.Validate(1)), b"", "magic number 0x1"),
        (wire.encode(wire.Validate()) + b"\x03" + (1 << 60).to_bytes(8, "little"), b"", "1152921504606846976 bytes"),
        (wire.encode(wire.Validate()) + wire.encode(wire.Ping(5)) + b"\xff", b"\5\0\0\0", "unknown opcode"),
        (b"RALLYPT\n" + bytes(40), b"", ""),  # a launcher's handshake
    ],
)
def test_a_protocol_violation_closes_its_connection_with_a_warning(
    server: StoreServer | SharedPort, lines: list[str], frame: bytes, replies: bytes, why: str
) -> None:
    with Raw(server.port) as greeted, Raw(server.port, greet=False) as other:
        port = other.socket.getsockname()[1]
        other.raw(frame)
        assert other.receive(len(replies)) == replies
        assert other.closed()
        assert greeted.ping()
    start = f"WARNING: the store is closing the connection from 127.0.0.1:{port}: "
    assert [line.startswith(start) and why in line for line in lines] == [True] * bool(why)


def test_slow_readers_are_not_read_from(server: StoreServer | SharedPort) -> None:
    value = os.urandom(128 * 1024)
    key = b"k" * 8192
    frame = wire.encode(wire.Get(key))
    with Raw(server.port) as other, Raw(server.port, receive_buffer=4096) as slow:
        other.send(wire.Set(key, value))
        before = resident()
        sent, quiet = 0, 0
        slow.socket.setblocking(False)
        while quiet < 200:  # rounds in which the server reads only from the other
            assert other.ping()
            try:
                sent += slow.socket.send(frame[sent % len(frame) :])
                quiet = 0
            except BlockingIOError:
                quiet += 1
        assert resident() - before < 40_000_000
        slow.reads_fast()
        for _ in range(sent // len(frame)):
            assert slow.value() == value


@pytest.mark.usefixtures("core")
def test_both_families_on_one_socket() -> None:
    with StoreServer() as server, Raw(server.port) as four:
        assert four.ping()
        if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
            with Raw(server.port, "::1") as six:
                assert six.ping()


def descriptors() -> int:
    """The number of open descriptors of this process."""
    gc.collect()  # or a socket from another test may close between two counts
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("core")
def test_close() -> None:
    before = descriptors()
    server = StoreServer("127.0.0.1")
    clients = [Raw(server.port) for _ in range(5)]
    assert all(client.ping() for client in clients)
    clients[0].send(wire.Wait([b"never"]))
    server.close()
    server.close()
    for client in clients:
        with client:
            assert client.closed()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    assert len(os.listdir("/proc/self/fd")) == before
    with StoreServer("127.0.0.1", server.port) as again, Raw(again.port) as client:
        assert client.ping()


@pytest.mark.usefixtures("core")
def test_close_while_clients_arrive() -> None:
    before = descriptors()
    for _ in range(20):
        server = StoreServer("127.0.0.1")
        clients = [Raw(server.port) for _ in range(3)]
        server.close()
        for client in clients:
            with client:
                assert client.closed()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("core")
def test_without_descriptors_the_server_starts_later(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(server_module, "RETRY", 0.05)
    with StoreServer("127.0.0.1") as server, socket.socket() as client:
        client.settimeout(DEADLINE)
        with no_more_descriptors():
            client.connect(("127.0.0.1", server.port))
            until(lambda: bool(lines))
        client.sendall(wire.encode(wire.Validate()) + wire.encode(wire.Ping(7)))
        assert client.recv(4) == b"\x07\0\0\0"
    assert lines[0].startswith(f"WARNING: the store on port {server.port} cannot serve yet; trying again in 0.05 s: ")
    assert os.strerror(errno.EMFILE) in lines[0]


@pytest.mark.usefixtures("core")
def test_many_clients_raise_the_soft_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.base.descriptors._before", None)  # later reapers inherit that limit
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        few = highest + 320
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        server = stack.enter_context(StoreServer("127.0.0.1"))
        here = [stack.enter_context(Raw(server.port)) for _ in range(few * 45 // 100)]  # two descriptors per client
        assert all(client.ping() for client in here)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])


def test_close_without_descriptors(lines: list[str]) -> None:
    server = StoreServer("127.0.0.1")
    with socket.socket() as client:
        client.settimeout(DEADLINE)
        with no_more_descriptors():
            client.connect(("127.0.0.1", server.port))
            until(lambda: bool(lines))
            server.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_an_internal_error_ends_the_store(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Clients must not wait for replies that never come."""
    choose("python", monkeypatch)
    before = descriptors()
    with StoreServer("127.0.0.1") as server, Raw(server.port) as client:
        assert client.ping()
        monkeypatch.setattr(PlainTransport, "_send_owed", lambda _self: 1 // 0)
        client.send(wire.Ping(1))
        assert client.closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
    assert lines == [
        f"ERROR: an internal error ended the store on port {server.port}, so its clients are being disconnected"
    ]
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_threads_the_server_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = descriptors()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="no more threads; raise the limit of processes"):
        StoreServer("127.0.0.1")
    assert len(os.listdir("/proc/self/fd")) == before


def test_connections_after_close_are_closed() -> None:
    store = StoreThread("a store")
    store.close()
    near, far = socket.socketpair()
    with far:
        store.add_connection(near, b"")
        assert far.recv(1) == b""


@pytest.mark.process
def test_imports_wait_for_the_first_client() -> None:
    """Meanwhile, the caller's thread starts workers, and only one thread can import at a time."""
    code = (
        "import sys; from rallypoint.store.server import StoreServer; s = StoreServer('127.0.0.1');"
        "from rallypoint.store.client import TCPStore; import socket, time; time.sleep(0.1);"
        "print('rallypoint.store.transport' in sys.modules);"
        "TCPStore('127.0.0.1', s.port).set('k', 'v'); print('rallypoint.store.transport' in sys.modules);"
        "print([name for name in ('asyncio', 'uvloop', 'msgspec', 'tempfile') if name in sys.modules])"
    )
    out = completed([sys.executable, "-c", code], check=True)
    assert out.stdout.split("\n") == ["False", "True", "[]", ""]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("python", "the one in Python (RALLYPOINT_STORE=python)"),
        ("compiled", "the one in C"),
        ("missing", "the one in Python (the one in C is not available: "),
    ],
)
def test_the_log_names_the_kind_of_store(
    choice: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if choice == "missing":
        monkeypatch.delenv(STORE_VARIABLE, raising=False)
        monkeypatch.setitem(sys.modules, "rallypoint.store.compiled", None)
    else:
        choose(choice, monkeypatch)
    with (
        caplog.at_level(logging.DEBUG, "rallypoint.store"),
        StoreServer("127.0.0.1") as server,
        Raw(server.port) as client,
    ):
        assert client.ping()
    (line,) = [line for line in caplog.messages if line.startswith(f"the store on port {server.port} is served by ")]
    assert line.endswith(f"by {name}") or (choice == "missing" and name in line)


def test_clients_of_a_held_store_wait_for_its_peers() -> None:
    with StoreServer("127.0.0.1", held=True) as server:
        assert server.is_held
        assert not any(str(server.port) in thread.name for thread in threading.enumerate()), "it needs no thread"
        early = socket.create_connection(("127.0.0.1", server.port), 30, ("127.0.0.2", 0))
        other = socket.create_connection(("127.0.0.1", server.port), 30, ("127.0.0.3", 0))
        for client in (early, other):
            client.sendall(wire.encode(wire.Validate()) + wire.encode(wire.Ping(7)))
        early.settimeout(0.2)
        with pytest.raises(TimeoutError):
            early.recv(4)
        early.settimeout(30)
        server.set_peers(["127.0.0.2"])
        assert early.recv(4) == b"\7\0\0\0"
        with suppress(ConnectionResetError):
            assert other.recv(4) == b""
        early.close()
        other.close()
    server = StoreServer("127.0.0.1", held=True)
    with socket.create_connection(("127.0.0.1", server.port), 30) as client:
        server.close()
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
