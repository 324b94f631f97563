"""A store on a server: the client of torch's TCPStore protocol, and with `is_master` the server too.

One connection and one lock: a thread that uses the store while another one waits in it waits as well, as with torch;
use a `clone` for each thread. Laws:

- requests and replies stay in step: whatever ends an operation in the middle of its reply (an error, an exception
  from a signal handler) ends the connection too, and every later operation raises;
- a wait that times out or is interrupted is cancelled, and the store can still be used;
- the server may start later than its clients, and its name may resolve later still, so every step of connecting is
  retried until the deadline. Only an answer that no store gives ends it at once.
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
"""Seconds that a server has, at least, for an answer that depends on no other client."""
_CANCEL_ANSWER = 5.0
"""Seconds that a server has to answer CANCEL_WAIT: the caller's own timeout is already over."""
_FINALIZER_WAIT = 1.0
"""Seconds that a finalizer waits until a server is closed; a millisecond unless this process is in trouble."""
_POLL = 0.01
_FIRST_DELAY = 0.01
_MAX_DELAY = 1.0
_MAX_BLOCK = 1e6
"""Seconds of the longest single wait that the kernel's poll can count; longer waits take several."""
_INIT = b"init/"
"""Counts the clients that gave a world size; no slash before it (contract section 9.2)."""


class TCPStore(RequestStore):
    """A store on the server at `host_name:port` (contract sections 9.2 and 9.5).

    Args:
        host_name: the server's name or address.
        port: the server's port; with `is_master`, 0 lets the kernel choose, see `port`.
        world_size: how many clients, this one included, will use the store. Each that gives it is counted.
        is_master: start the server too, on all interfaces of this machine.
        timeout: seconds, or a timedelta, for connecting and wherever a method waits.
        wait_for_workers: with `is_master` and `world_size`, return only when all clients have come.
        multi_tenant: share one server with other stores of this process that give the same port.
        master_listen_fd: with `is_master`, a listening socket's descriptor to serve on, which is then the store's.
        use_libuv: accepted as torch's callers give it, and without effect.

    Raises:
        StoreConnectionError: no store answered in time, or the port cannot be listened on.
        StoreProtocolError: something else than a store answered.
        StoreTimeoutError: not all clients came.
    """

    # What `__del__` looks at, also where the constructor did not come that far.
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
        self._keep_server = True  # it has a client elsewhere: it ends with `close`, and not when nobody holds this
        return store

    def clone(self) -> TCPStore:
        return TCPStore(self.host, self.port, timeout=self._timeout)

    def close(self) -> None:
        """End the connection, also under a thread that waits in it, and the server if this store started it."""
        connection, self._broken = self._connection, self._broken or "it was closed"
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            with self._lock:  # the thread that waits has left it by now
                connection.close()
        server, self._server = self._server, None
        if server is not None and release_server(server):
            server.close()

    def __del__(self) -> None:
        # Torch's users drop stores without closing them, and then want the port again.
        server = self._server
        if server is None or self._keep_server or sys.is_finalizing():
            return  # in an interpreter that ends, other threads have stopped, some of them with locks
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
        """Cancel the wait; whether it was granted before the cancelling arrived."""
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
            raise StoreProtocolError(f"{self._title()} answered a wait with {answer!r}, which is not the protocol")
        return True

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """The connection for one operation; if that does not end as it should, the connection ends with it.

        With the lock held. It is not taken here: a ^C can come when this has it and the block is not yet entered.
        """
        if self._broken is not None or self._connection is None:
            raise StoreConnectionError(f"{self._title()} cannot be used any more: {self._broken}; open a new one")
        try:
            yield self._connection
        except OSError as error:
            cause = self._end(self._connection, error)
            if isinstance(error, TimeoutError) and error.errno is None:  # with a number, the kernel has given it up
                raise StoreTimeoutError(
                    f"{self._title()} does not answer ({cause}); see whether its server is stopped or overloaded, and "
                    "open a new one"
                ) from error
            raise StoreConnectionError(
                f"{self._title()} is lost: {cause}; see whether its server still runs"
            ) from error
        except BaseException as error:
            self._end(self._connection, error)
            raise

    def _end(self, connection: socket.socket, error: BaseException) -> str:
        """The connection is of no use after `error`; in a few words, why not."""
        connection.close()
        if self._broken is None:  # else another thread has closed the store, and the error is what came of it
            self._broken = error_reason(error)
        return self._broken

    def _register_client(self, world_size: int) -> None:
        """Count this client; the server's own waits until all have come."""
        present = self._exchange(read_number, Op.ADD, _INIT, 1)
        deadline = Deadline.after(self._timeout)
        while self._server is not None and present < world_size:
            if deadline.expired:
                raise StoreTimeoutError(
                    f"only {present} of {world_size} clients came to {self._title()} within {self._timeout:g} s; "
                    "see which of them is missing, or wait longer"
                )
            time.sleep(_POLL)  # the protocol has no waiting for a number
            present = int(self._exchange(read_value, Op.GET, _INIT))


class _ClientConnection(socket.socket):
    """One that needs no `close`, as torch's users close no stores: without it, the collector's coming to it before its
    store would be a ResourceWarning.
    """

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
            f"a store's server cannot listen on port {port} ({error_reason(error)}); "
            "choose another port, or 0 for a free one"
        ) from error


def connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    """A socket connected to the store at `endpoint`, greeted and answered within `timeout` seconds.

    Raises:
        StoreConnectionError: no store answered in time; the message has the last reason.
        StoreProtocolError: something else than a store answered.
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
                f"no store answered at {endpoint} within {timeout:g} s ({last}); "
                "see whether host and port are right and its server is running"
            )
        # A jitter, so that a thousand clients of one lost server do not come back at the same moment.
        time.sleep(min(delay * (0.5 + os.urandom(1)[0] / 512), deadline.remaining()))
        delay = min(2 * delay, _MAX_DELAY)


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Exactly `size` bytes; memory grows as they arrive. TimeoutError at the deadline, ConnectionError if it ends."""
    data = bytearray()
    while len(data) < size:
        connection.settimeout(min(deadline.remaining(), _MAX_BLOCK))
        try:
            piece = connection.recv(min(size - len(data), 1 << 20))
        except (TimeoutError, BlockingIOError):
            if deadline.expired:
                raise TimeoutError(f"{len(data)} of {size} bytes came in time") from None
            continue
        if not piece:
            raise ConnectionResetError("the server closed the connection")
        data += piece
    return bytes(data)


def _try_once(endpoint: Endpoint, deadline: Deadline) -> socket.socket:
    """Try each address of the host once, none of them so long that no time is left for the next."""
    addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError("the name has no address")
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
        raise TimeoutError("the connection was accepted but the greeting never answered") from None
    if answer != wire.U32.pack(nonce):
        raise StoreProtocolError(
            f"{endpoint} is not a store: it answered a store's greeting with {answer!r}; see whether the port is right"
        )


def error_reason(error: BaseException) -> str:
    """An error in a few words, for a sentence that says what it ended."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
