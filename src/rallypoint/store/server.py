"""A store on a thread of its own, and the server: that thread with a listening socket, which is open from the start.

No request of a store's clients delays anything else in this process. `plain` has the laws of what is served.
Laws of the thread:

- until the first client is there, which the kernel keeps meanwhile, it only sleeps: it imports nothing, and costs the
  start of workers nothing;
- where resources are lacking (descriptors, memory) it logs that and tries again, for as long as the store is open;
- a defect is logged and ends the store: its clients are disconnected at once;
- when `close` returns, all connections are closed; memory is given back afterwards, which may take longer.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections import deque

from rallypoint.base.endpoint import listening_socket
from rallypoint.base.kernel import Wakeup
from rallypoint.base.light_typing import TYPE_CHECKING, TypeGuard
from rallypoint.base.log import RateLimitedLog, get_logger

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from rallypoint.store.transport import StoreGuard, StoreTransport, TransportContext

_logger = get_logger(__name__)

STORE_VARIABLE = "RALLYPOINT_STORE"

RETRY = 1.0
"""Seconds after which it is tried again where resources were lacking."""


class StoreThread:
    """A store and its thread, which ends with `close` at the latest.

    Args:
        name: of the thread, and of the store in log lines.
        listener: a listening socket, closed in the end; without one, connections come by `add_connection` only.
        guard: who may connect, and what each may have; see there for what is granted otherwise.
        own_user: whether other users of this machine are refused, whatever `guard` says.
        held: whether there is no thread, and clients have to wait in the kernel, until `set_peers` has said who may.

    Raises:
        OSError: there are no descriptors, or no threads, to be had.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket | None = None,
        guard: StoreGuard | None = None,
        *,
        own_user: bool = False,
        held: bool = False,
    ) -> None:
        self._guard = guard
        self._own_user = own_user
        self._process = os.getpid()
        self._name = name
        self._listener = listener
        self._log_lines = RateLimitedLog(_logger, "connections that it refused")
        self._lock = threading.RLock()  # a finalizer may come in between, and close this or another store
        self._new_connections: deque[tuple[socket.socket, bytes]] = deque()
        self._peers: list[Sequence[str] | None] = []  # who is to be, if that is new
        self._closing = False
        self._over = False
        self._ended = threading.Event()
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None
        if not held:
            try:
                self._begin()
            except OSError:
                self._wakeup.close()
                raise

    def _begin(self) -> None:
        """Start the thread. Raises OSError: there are no more."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            raise OSError(errno.EAGAIN, "no more threads; raise the limit of processes (`ulimit -u`)") from None
        self._thread = thread

    @property
    def is_held(self) -> bool:
        """Whether nobody is served yet, since it was not said who may connect."""
        return self._thread is None

    def add_connection(self, client: socket.socket, data: bytes) -> None:
        """Serve a connection from which `data` was read already; it is closed if the store has ended. On any thread."""
        with self._lock:
            if not self._over:
                self._new_connections.append((client, data))
                self._wakeup.set()
                return
        client.close()

    def set_peers(self, peers: Sequence[str] | None) -> None:
        """From now on only these addresses and networks may be connected (None: all); others are disconnected. On any
        thread. Raises UserError if one of them is neither; OSError: there is no thread for a store that was held."""
        if peers is not None:
            from rallypoint.store.transport import networks

            networks(peers)
        with self._lock:
            self._peers = [peers]
            if self._thread is not None:
                if not self._over:
                    self._wakeup.set()
            elif not self._closing:
                self._begin()  # which takes the peers before it serves anybody

    def close(self, most: float | None = None) -> None:
        """End all connections and stop listening. All is closed when this returns. Idempotent; on any thread.

        In a copy of the process that made it, it continues where it was made, and the copy only closes its descriptors.

        Args:
            most: seconds to wait at most: a finalizer may have interrupted anybody, the store's own thread included.
        """
        if os.getpid() != self._process:  # nobody would signal the end here
            self._release()
            return
        with self._lock:
            self._closing = True
            if self._thread is None:
                self._release()
                return
            if not self._over:
                self._wakeup.set()
        if threading.current_thread() is not self._thread:
            self._ended.wait(most)

    def _release(self) -> None:
        if not self._over:
            self._over = True
            self._wakeup.close()
            if self._listener is not None:
                self._listener.close()

    def _run(self) -> None:
        transport: StoreTransport | None = None
        try:
            if not self._closing:
                self._sleep(self._listener)
            transport = self._open()
            while self._apply_requests(transport):
                transport.serve()
        except BaseException:
            _logger.exception("a defect ends %s: its clients are disconnected", self._name)
        finally:
            self._end(transport)
        if transport is not None:
            transport.release_memory()

    def _sleep(self, listener: socket.socket | None = None, seconds: float | None = None) -> None:
        """Wait until there is a client, somebody wants something of the store, or so many seconds have passed."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if listener is not None:
            poll.register(listener, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)

    def _open(self) -> StoreTransport | None:
        """The store, as soon as there are means for it; None if it is closed before."""
        while not self._closing:
            try:
                from rallypoint.store.transport import StoreGuard, TransportContext

                guard = self._guard or StoreGuard()
                guard = guard._replace(own_user=guard.own_user or self._own_user)
                return open_transport(TransportContext(self._listener, self._wakeup.fileno(), self._log_lines, guard))
            except (OSError, MemoryError, ImportError) as error:
                self._log_lines.warning("%s cannot serve yet, and tries again in %g s: %s", self._name, RETRY, error)
                self._wakeup.clear()  # clients that have connected have to wait as well
                self._sleep(seconds=RETRY)
        return None

    def _apply_requests(self, transport: StoreTransport | None) -> TypeGuard[StoreTransport]:
        """Hand over new connections and peers; whether the store is there and still to serve."""
        if transport is None:
            return False
        with self._lock:
            arrivals, self._new_connections = self._new_connections, deque()
            admitted, self._peers = self._peers, []
        for peers in admitted:
            transport.set_peers(peers)
        for client, data in arrivals:
            transport.add_connection(client, data)
        return not self._closing

    def _end(self, transport: StoreTransport | None) -> None:
        if self._listener is not None:
            self._listener.close()
        try:
            if transport is not None:
                transport.close()
        except BaseException:
            _logger.exception("a defect in the end of %s", self._name)
        with self._lock:
            self._release()
        for client, _ in self._new_connections:
            client.close()
        self._log_lines.summarize()
        self._ended.set()


class StoreServer(StoreThread):
    """A store for torch's TCPStore clients and ours, for as long as it is open; `guard`, `own_user`, `held` as
    `StoreThread`.

    It listens at `host` (empty: all interfaces) and `port` (0: see the attribute), or on `listener`, which it closes.

    Raises:
        OSError: the port is taken, the address is not of this machine, or there are no descriptors or threads left.
    """

    def __init__(
        self,
        host: str = "",
        port: int = 0,
        listener: socket.socket | None = None,
        guard: StoreGuard | None = None,
        *,
        own_user: bool = False,
        held: bool = False,
    ) -> None:
        self.host = host
        listener = listener if listener is not None else listening_socket(host, port)
        self.port: int = listener.getsockname()[1]
        try:
            super().__init__(f"the store on port {self.port}", listener, guard, own_user=own_user, held=held)
        except BaseException:
            listener.close()
            raise

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def open_transport(context: TransportContext) -> StoreTransport:
    """A new store that serves what the context says: the one in C, if it was built.

    `RALLYPOINT_STORE=python` has the one in Python serve in any case.
    """
    name = "a shared port" if context.listener is None else f"port {context.listener.getsockname()[1]}"
    reason = f"{STORE_VARIABLE}=python"
    if os.environ.get(STORE_VARIABLE) != "python":
        try:
            from rallypoint.store.compiled import CompiledTransport
        except ImportError as error:
            reason = f"the one in C is not available: {error}"
        else:
            _logger.debug("the store on %s is served by the one in C", name)
            return CompiledTransport(context)
    _logger.debug("the store on %s is served by the one in Python (%s)", name, reason)

    from rallypoint.store.plain import PlainTransport

    return PlainTransport(context)


class RoundStores:
    """One port, and behind it a new store for each round: for servers that hand connections over by their first bytes.

    A round's keys cannot be read in the next, although workers find both at the same address. Used by any thread.

    Args:
        guard: who may connect, and what each may have.
        own_user: see `StoreThread`.
    """

    def __init__(self, guard: StoreGuard | None = None, *, own_user: bool = False) -> None:
        self._guard = guard
        self._own_user = own_user
        self._peers: list[Sequence[str] | None] = []  # who is, if that was said
        self._lock = threading.Lock()
        self._current: StoreThread | None = None
        self._previous: list[StoreThread] = []
        self._closed = False

    def add_connection(self, client: socket.socket, data: bytes) -> None:
        """Serve a connection, from which this has been read already; close it if it cannot be served. Raises OSError:
        there are no descriptors, or no threads, for a store.
        """
        with self._lock:
            try:
                if self._current is None and not self._closed:
                    self._current = StoreThread("the store of this round", guard=self._guard, own_user=self._own_user)
                    for peers in self._peers:
                        self._current.set_peers(peers)
            finally:
                if self._current is None:
                    client.close()
            if self._current is not None:
                self._current.add_connection(client, data)

    def next_round(self) -> None:
        """From now on new connections get a new, empty store; old ones keep theirs."""
        with self._lock:
            if self._current is not None:
                self._previous.append(self._current)
                self._current = None

    def set_peers(self, peers: Sequence[str] | None) -> None:
        """As `StoreThread.set_peers`, for later rounds too."""
        from rallypoint.store.transport import networks

        networks(peers)
        with self._lock:
            self._peers = [peers]
            if self._current is not None:
                self._current.set_peers(peers)

    def end_previous(self) -> None:
        """End the connections to the stores of earlier rounds."""
        with self._lock:
            previous, self._previous = self._previous, []
        for store in previous:
            store.close()

    def close(self) -> None:
        """End all connections, those still to come as well. Idempotent."""
        with self._lock:
            self._closed = True
        self.next_round()
        self.end_previous()


# Servers that several stores of this process share by their port (`multi_tenant`, contract section 9.5).

_lock = threading.RLock()  # a finalizer may come in between, and release one
_servers: dict[int, list[StoreServer]] = {}  # for each port its server, once for each store that uses it


def acquire_server(port: int) -> StoreServer:
    """The shared server on `port`, started if there is none; 0 always starts one. Raises OSError: the port is taken by
    another process.
    """
    with _lock:
        users = _servers.get(port)
        server = users[0] if users else StoreServer(port=port)
        _servers.setdefault(server.port, []).append(server)
        return server


def release_server(server: StoreServer) -> bool:
    """One store less uses `server`. Whether it is now the caller's, to be closed: nobody else uses it."""
    with _lock:
        users = _servers.get(server.port, [])
        if server not in users:
            return True
        users.pop()
        if users:
            return False
        del _servers[server.port]
        return True


def _reset_after_fork() -> None:
    """A forked process does not serve; the listening sockets belong to the original."""
    global _lock
    _lock = threading.RLock()
    _servers.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
