"""A store on a server: a client of torch's TCPStore protocol, and with `is_master` also the server.

A store has one connection and one lock: while one thread waits in it, other threads that use it also wait, as with
torch. Use one `clone` per thread. Laws:

- requests and replies stay in step: an error or a signal handler's exception in the middle of a reply also ends the
connection, and every later operation raises;
- a wait that times out or is interrupted is cancelled, and the store remains usable;
- the server can start after its clients, and its name can resolve even later, so every step of connecting is retried
until the deadline. Only an answer from something other than a store stops the attempts at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.store import wire
from rallypoint.store.api import DEFAULT_TIMEOUT, Receive, RequestStore, read_number, read_value, torch_module
from rallypoint.store.errors import StoreConnectionError, StoreError, StoreProtocolError, StoreTimeoutError
from rallypoint.store.server import StoreServer, acquire_server, release_server
from rallypoint.store.wire import Op

if TYPE_CHECKING:
    from datetime import timedelta

T = TypeVar("T")


_ANSWER = 60.0
"""Minimum seconds to wait for an answer that depends on no other client."""
_CANCEL_ANSWER = 5.0
"""Seconds for a server to answer CANCEL_WAIT: the caller's own timeout has already passed."""
_FINALIZER_WAIT = 1.0
"""Seconds that a finalizer waits until a server is closed, which normally takes a millisecond."""
_POLL = 0.01
_FIRST_DELAY = 0.01
_MAX_DELAY = 1.0
_MAX_BLOCK = 1e6
"""Maximum seconds per wait in the kernel's poll; longer waits take several."""
_INIT = b"init/"
"""Key that counts clients with a world size, without a leading slash (contract section 9.2)."""


class TCPStore(RequestStore):
    """A store on the server at `host_name:port` (contract sections 9.2 and 9.5).

    Args:
        host_name: the server's name or address.
        port: the server's port; with `is_master`, 0 lets the kernel choose, see `port`.
        world_size: the number of the store's clients, including this one. Each client that sets it counts.
        is_master: also start the server, on all interfaces of this machine.
        timeout: seconds, or a timedelta, for connecting and for methods that wait.
        wait_for_workers: with `is_master` and `world_size`, return only after all clients connect.
        multi_tenant: share one server with other stores of this process on the same port.
        master_listen_fd: with `is_master`, the descriptor of a listening socket to serve on, which the store then owns.
        use_libuv: accepted for compatibility, without effect.

    Raises:
        StoreConnectionError: no store answered in time, or the port cannot be listened on.
        StoreProtocolError: something other than a store answered.
    """

    # Needed by `__del__` if the constructor fails early.
    _connection: socket.socket | None = None
    _server: StoreServer | None = None
    _keep_server = False

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        super().__init__(timeout)
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._libuv = use_libuv
        if is_master:
            self._server = _start_server(port, multi_tenant, master_listen_fd)
            port = self._server.port
        self._endpoint = Endpoint(host_name, port)
        try:
            self._connection = connect(self._endpoint, self._timeout)
            if world_size is not None and world_size > 0 and wait_for_workers:
                self._register_client(world_size)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        return self._endpoint.host

    @property
    def port(self) -> int:
        return self._endpoint.port

    @property
    def libuvBackend(self) -> bool:
        return self._libuv

    def to_torch(self) -> Any:
        store = torch_module().TCPStore(self.host, self.port, timeout=self.timeout, wait_for_workers=False)
        self._keep_server = True  # another client uses it: only `close` ends it, not the collector
        return store

    def clone(self) -> TCPStore:
        return TCPStore(self.host, self.port, timeout=self._timeout)

    def close(self) -> None:
        """End the connection, even while a thread waits in it, and the server if this store started it."""
        connection, self._broken = self._connection, self._broken or "it was closed"
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            with self._lock:  # by now the waiting thread has left it
                connection.close()
        server, self._server = self._server, None
        if server is not None and release_server(server):
            server.close()

    def __del__(self) -> None:
        # torch's users drop stores without closing them, and then reuse the port.
        server = self._server
        if server is None or self._keep_server or sys.is_finalizing():
            return  # when the interpreter ends, other threads have stopped, some while holding locks
        self._server = None
        if release_server(server):
            server.close(_FINALIZER_WAIT)

    def _title(self) -> str:
        return f"the store at {self._endpoint}"

    def _exchange(self, read: Callable[[Receive], T], op: Op, *fields: Any) -> T:
        data = wire.encode(op, *fields)
        with self._lock, self._connected() as connection:
            deadline = Deadline.after(max(self._timeout, _ANSWER))
            _send(connection, data)
            return read(lambda size: receive(connection, size, deadline))

    def _await(self, timeout: float, op: Op, *fields: Any) -> bool:
        data = wire.encode(op, *fields)
        with self._lock, self._connected() as connection:
            _send(connection, data)
            try:
                return self._is_done(receive(connection, 1, Deadline.after(timeout)))
            except TimeoutError:
                return self._cancel_wait(connection)
            except (OSError, StoreError):
                raise
            except BaseException as error:
                self._cancel_wait(connection)
                interruption = error
        raise interruption  # outside the block, which would end the connection

    def _cancel_wait(self, connection: socket.socket) -> bool:
        """Cancel the wait. Returns whether it ended before the cancellation arrived."""
        _send(connection, wire.encode(Op.CANCEL_WAIT))
        deadline = Deadline.after(_CANCEL_ANSWER)
        first = receive(connection, 1, deadline)
        if first == wire.CANCELLED:
            return False
        self._is_done(first)
        receive(connection, 1, deadline)
        return True

    def _is_done(self, answer: bytes) -> bool:
        if answer != wire.DONE:
            raise StoreProtocolError(f"{self._title()} answered a wait with {answer!r}, which violates the protocol")
        return True

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """The connection for one operation; if that fails, the connection ends too.

        The caller holds the lock. It is not taken here: a ^C could arrive after that and before the block is entered.
        """
        if self._broken is not None or self._connection is None:
            raise StoreConnectionError(f"{self._title()} cannot be used any more: {self._broken}; open a new store")
        try:
            yield self._connection
        except OSError as error:
            cause = self._end(self._connection, error)
            if isinstance(error, TimeoutError) and error.errno is None:  # with a number, the kernel gave up
                raise StoreTimeoutError(
                    f"{self._title()} does not answer ({cause}); check whether its server is stopped or overloaded, "
                    "and open a new store"
                ) from error
            raise StoreConnectionError(
                f"{self._title()} was lost: {cause}; check whether its server is still running"
            ) from error
        except BaseException as error:
            self._end(self._connection, error)
            raise

    def _end(self, connection: socket.socket, error: BaseException) -> str:
        """End the connection after `error`; return the reason in a few words."""
        connection.close()
        if self._broken is None:  # otherwise the error comes from another thread that closed the store
            self._broken = error_reason(error)
        return self._broken

    def _register_client(self, world_size: int) -> None:
        """Count this client; the server's own client waits for all others."""
        present = self._exchange(read_number, Op.ADD, _INIT, 1)
        deadline = Deadline.after(self._timeout)
        while self._server is not None and present < world_size:
            if deadline.expired:
                raise StoreTimeoutError(
                    f"only {present} of {world_size} clients connected to {self._title()} within {self._timeout:g} s; "
                    "find out which of them is missing, or wait longer"
                )
            time.sleep(_POLL)  # the protocol cannot wait for a number
            present = int(self._exchange(read_value, Op.GET, _INIT))


class _ClientConnection(socket.socket):
    """A socket that needs no `close`, since torch's users do not close stores: if the collector frees it before its
    store, it causes no ResourceWarning."""

    def __del__(self) -> None:
        self.close()


def _send(connection: socket.socket, data: bytes) -> None:
    connection.settimeout(_ANSWER)
    connection.sendall(data)


def _start_server(port: int, multi_tenant: bool, listen_fd: int | None) -> StoreServer:
    try:
        if listen_fd is not None:
            return StoreServer(listener=socket.socket(fileno=listen_fd))
        return acquire_server(port) if multi_tenant else StoreServer(port=port)
    except OSError as error:
        raise StoreConnectionError(
            f"the store server cannot listen on port {port} ({error_reason(error)}); "
            "choose another port, or 0 for a free one"
        ) from error


def connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    """Connect to the store at `endpoint` and exchange greetings, within `timeout` seconds.

    Raises:
        StoreConnectionError: no store answered in time; the message contains the last reason.
        StoreProtocolError: something other than a store answered.
    """
    deadline = Deadline.after(timeout)
    delay = _FIRST_DELAY
    while True:
        try:
            return _try_once(endpoint, deadline)
        except OSError as error:
            last = error_reason(error)
        if deadline.expired:
            raise StoreConnectionError(
                f"no store answered at {endpoint} within {timeout:g} s ({last}); check the host and the port, and that "
                "the server is running"
            )
        # Add jitter, so that a thousand clients of a lost server do not return at the same time.
        time.sleep(min(delay * (0.5 + os.urandom(1)[0] / 512), deadline.remaining()))
        delay = min(2 * delay, _MAX_DELAY)


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Receive exactly `size` bytes; memory grows as they arrive. Raises TimeoutError or ConnectionError."""
    data = bytearray()
    while len(data) < size:
        connection.settimeout(min(deadline.remaining(), _MAX_BLOCK))
        try:
            piece = connection.recv(min(size - len(data), 1 << 20))
        except (TimeoutError, BlockingIOError):
            if deadline.expired:
                raise TimeoutError(f"only {len(data)} of {size} bytes arrived in time") from None
            continue
        if not piece:
            raise ConnectionResetError("the server closed the connection")
        data += piece
    return bytes(data)


def _try_once(endpoint: Endpoint, deadline: Deadline) -> socket.socket:
    """Try each of the host's addresses once, leaving time for the next."""
    addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError("the host name has no address")
    for tried, (family, kind, protocol, _, address) in enumerate(addresses):
        share = Deadline.after(deadline.remaining() / (len(addresses) - tried))
        connection = _ClientConnection(family, kind, protocol)
        try:
            connection.settimeout(min(max(share.remaining(), 0.001), _MAX_BLOCK))
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send_greeting(connection, endpoint, share)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure


def _send_greeting(connection: socket.socket, endpoint: Endpoint, deadline: Deadline) -> None:
    nonce = os.getpid() & 0xFFFFFFFF
    connection.sendall(wire.greeting() + wire.encode(wire.Op.PING, nonce))
    try:
        answer = receive(connection, wire.U32.size, deadline)
    except TimeoutError:
        raise TimeoutError("the server accepted the connection but did not answer the greeting") from None
    if answer != wire.U32.pack(nonce):
        raise StoreProtocolError(f"{endpoint} is not a store: it answered the greeting with {answer!r}; check the port")


def error_reason(error: BaseException) -> str:
    """Describe an error in a few words, as the reason in a sentence."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
