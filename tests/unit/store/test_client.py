"""The client: connecting, waiting, and errors of the server."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from rallypoint.base.endpoint import listening_socket
from rallypoint.store import client
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreConnectionError, StoreProtocolError, StoreTimeoutError
from rallypoint.store.server import StoreServer
from tests import typed_requests as wire
from tests.interrupts import interrupt_everywhere
from tests.ports import free_port
from tests.unit.store.sockets import DEADLINE, Raw
from tests.waiting import at_once, in_thread

GREETING = wire.encode(wire.Validate()) + wire.encode(wire.Ping(0))


@contextlib.contextmanager
def peer(script: Callable[[socket.socket], object], *, greets: bool = True) -> Iterator[int]:
    """Greet as a store does, then run `script` with the server's one connection; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(DEADLINE)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(DEADLINE)
            if greets:
                connection.sendall(connection.recv(len(GREETING), socket.MSG_WAITALL)[-4:])
            script(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(DEADLINE)
        listener.close()


def expect(connection: socket.socket, request: wire.Request) -> None:
    data = wire.encode(request)
    assert connection.recv(len(data), socket.MSG_WAITALL) == data


def read_to_end(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def test_the_client_waits_for_its_server() -> None:
    port = free_port()
    servers: list[StoreServer] = []
    timer = threading.Timer(0.1, lambda: servers.append(StoreServer("127.0.0.1", port)))
    timer.start()
    with TCPStore("127.0.0.1", port, timeout=DEADLINE) as store:
        store.set("k", "v")
    timer.join()
    servers[0].close()


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "[Nn]ame|resolution")],
)
def test_a_missing_server_is_reported(host: str, why: str) -> None:
    port = free_port()
    with pytest.raises(StoreConnectionError, match=rf"no store answered at {host}:{port} within 0.05 s \(.*({why})"):
        TCPStore(host, port, timeout=0.05)


def test_a_server_that_is_no_store_is_reported() -> None:
    def http(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with (
        peer(http, greets=False) as port,
        pytest.raises(StoreProtocolError, match=rf"127.0.0.1:{port} is not a store: .*b'HTTP'"),
    ):
        TCPStore("127.0.0.1", port, timeout=DEADLINE)
    with (
        peer(read_to_end, greets=False) as port,
        pytest.raises(
            StoreConnectionError, match=r"within 1 s \(.*accepted the connection but did not answer the greeting"
        ),
    ):
        TCPStore("127.0.0.1", port, timeout=1.0)


def test_keys_on_the_wire() -> None:
    with StoreServer() as server, TCPStore("127.0.0.1", server.port, world_size=2) as store, Raw(server.port) as raw:
        store.set("k", "")
        assert store.num_keys() == 2
        raw.send(wire.ListKeys())
        assert raw.receive(8) == wire.I64.pack(2)
        assert {raw.value(), raw.value()} == {b"/k", b"init/"}
        raw.send(wire.DeleteKey(b"/k"), wire.Set(b"/\xff\xfe", b"v"))
        raw.receive(8)
        (key,) = store.list_keys()
        assert store.get(key) == b"v", "keys need not be text"


def test_the_master_waits_for_workers() -> None:
    with pytest.raises(StoreTimeoutError, match="only 1 of 2 clients connected"):
        TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=1.0)
    listener = listening_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    worker = in_thread(lambda: TCPStore("127.0.0.1", port, world_size=2))
    with TCPStore("127.0.0.1", port, 2, is_master=True, master_listen_fd=listener.detach()) as master:
        assert master.port == port
        worker().close()


def test_a_wait_that_ends_while_it_is_cancelled_succeeds() -> None:
    def script(connection: socket.socket) -> None:
        expect(connection, wire.Wait([b"/k"]))
        expect(connection, wire.CancelWait())
        connection.sendall(wire.DONE + wire.CANCELLED)
        expect(connection, wire.Get(b"/k"))
        connection.sendall(wire.string(b"v"))

    with peer(script) as port, TCPStore("127.0.0.1", port, timeout=DEADLINE) as store:
        store.set_timeout(0.01)
        assert store.get("k") == b"v"


class Interrupted(Exception):
    """Raised by a signal handler, like KeyboardInterrupt."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Interrupt the main thread once."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_an_interrupted_wait_is_cancelled() -> None:
    with StoreServer() as server, TCPStore("127.0.0.1", server.port) as store, Raw(server.port) as other:
        with pytest.raises(Interrupted), alarm(0.05):
            store.wait(["k"])
        other.send(wire.Set(b"/k", b"v"))
        assert other.ping()
        assert store.get("k") == b"v"


def test_a_signal_handler_can_close_the_store() -> None:
    with contextlib.closing(TCPStore("127.0.0.1", 0, is_master=True)) as server:
        server.set("key", "value")
        stores = [server.clone()]
        for place, error in interrupt_everywhere(lambda: stores[-1].get("key")):
            closing = threading.Thread(target=stores[-1].close, daemon=True)
            closing.start()
            closing.join(DEADLINE)
            assert not closing.is_alive(), f"interrupted in {place}, an operation left the lock taken: {error!r}"
            stores.append(server.clone())
        stores[-1].close()


def test_an_interrupted_operation_ends_the_store() -> None:
    with peer(read_to_end) as port, TCPStore("127.0.0.1", port) as store:
        with pytest.raises(Interrupted), alarm(1.0):
            store.num_keys()
        with pytest.raises(StoreConnectionError, match=r"cannot be used any more: Interrupted; open a new store"):
            store.num_keys()


@pytest.mark.parametrize("reply", [b"", b"\x08\0\0"])
def test_a_server_that_closes_mid_reply_is_reported(reply: bytes) -> None:
    def script(connection: socket.socket) -> None:
        expect(connection, wire.NumKeys())
        connection.sendall(reply)

    with peer(script) as port, TCPStore("127.0.0.1", port) as store:
        with pytest.raises(StoreConnectionError, match=f"the store at 127.0.0.1:{port} was lost: the server closed"):
            store.num_keys()
        with pytest.raises(StoreConnectionError, match="cannot be used any more: the server closed the connection"):
            store.set("k", "v")


@pytest.mark.parametrize(
    "use",
    [lambda store: store.num_keys(), lambda store: store.check(["k"]), lambda store: store.get("k")],
    ids=["num_keys", "check", "get"],
)
def test_a_silent_server_is_a_timeout(monkeypatch: pytest.MonkeyPatch, use: Callable[[TCPStore], object]) -> None:
    monkeypatch.setattr(client, "_ANSWER", 0.1)
    monkeypatch.setattr(client, "_CANCEL_ANSWER", 0.1)
    end = threading.Event()

    with peer(lambda _: end.wait(DEADLINE)) as port, TCPStore("127.0.0.1", port, timeout=0.1) as store:
        with pytest.raises(StoreTimeoutError, match=f"the store at 127.0.0.1:{port} does not answer"):
            use(store)
        with pytest.raises(StoreConnectionError, match=r"cannot be used any more: .* arrived in time"):
            use(store)
        end.set()


@pytest.mark.parametrize(
    ("reply", "use"),
    [
        ((1 << 60).to_bytes(8, "little"), lambda store: store.compare_set("k", "", "v")),
        ((1 << 60).to_bytes(8, "little"), lambda store: store.list_keys()),
        (b"\x07", lambda store: store.check(["k"])),
        (b"\x07", lambda store: store.wait(["k"])),
    ],
)
def test_invalid_replies_are_reported(reply: bytes, use: Callable[[TCPStore], object]) -> None:
    def script(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(reply)
        read_to_end(connection)

    with peer(script) as port, TCPStore("127.0.0.1", port) as store:
        with pytest.raises(StoreProtocolError, match=r"violates the protocol|not a store"):
            use(store)
        with pytest.raises(StoreConnectionError, match="cannot be used any more"):
            store.num_keys()


def test_closing_from_another_thread_ends_a_wait() -> None:
    with StoreServer() as server, Raw(server.port) as other:
        store = TCPStore("127.0.0.1", server.port)
        wait = in_thread(lambda: store.wait(["a", "b"]))
        other.send(wire.Set(b"/a", b""))
        assert other.ping()
        store.close()
        with pytest.raises(StoreConnectionError, match="it was closed"):
            wait()
        store.close()


def test_the_client_refuses_long_keys_and_values() -> None:
    with StoreServer() as server, TCPStore("127.0.0.1", server.port) as store:
        with pytest.raises(StoreProtocolError, match="a key of 8193 bytes"):
            store.get("k" * 8192)
        with pytest.raises(StoreProtocolError, match="a value of 8388609 bytes"):
            store.set("k", bytes(8388609))
        store.set("k" * 8191, bytes(8388608))
        assert store.get("k" * 8191) == bytes(8388608)


def test_threads_share_a_store() -> None:
    with StoreServer() as server, TCPStore("127.0.0.1", server.port) as store:
        at_once(*[lambda: [store.add("n", 1) for _ in range(200)]] * 5)
        assert store.add("n", 0) == 1000
