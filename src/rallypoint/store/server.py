"""A store on its own thread; a server adds a listening socket, which is open from the start.

No client's request delays anything else in this process. `plain` states the laws of serving. Laws of the thread:

- until the first client connects (the kernel queues it), the thread only sleeps: it imports nothing, and does not delay
the start of workers;
- if resources (descriptors, memory) are lacking, it logs that and retries while the store is open;
- an internal error is logged and ends the store: its clients are disconnected at once;
- when `close` returns, all connections are closed; releasing memory can take longer.
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
"""Seconds before another attempt after resources ran out."""


class StoreThread:
    """A store and its thread, which ends at `close` or earlier.

    Args:
        name: the name of the thread, and of the store in log lines.
        listener: a listening socket, closed at the end; without one, connections come only from `add_connection`.
        guard: the allowed peers and their limits; see `StoreGuard` for the defaults.
        own_user: whether to refuse other users of this machine, regardless of `guard`.
        held: whether clients wait in the kernel, without a thread, until a call of `set_peers`.

    Raises:
        OSError: no descriptors or threads are left.
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
        self._lock = threading.RLock()  # a finalizer might interrupt, and close this or another store
        self._new_connections: deque[tuple[socket.socket, bytes]] = deque()
        self._peers: list[Sequence[str] | None] = []  # new peers to apply
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
        """Start the thread. Raises OSError if no thread is available."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            raise OSError(errno.EAGAIN, "no more threads; raise the limit of processes (`ulimit -u`)") from None
        self._thread = thread

    @property
    def is_held(self) -> bool:
        """Whether clients are still waiting because `set_peers` was not called."""
        return self._thread is None

    def add_connection(self, client: socket.socket, data: bytes) -> None:
        """Serve a connection from which `data` was already read; close it if the store has ended. On any thread."""
        with self._lock:
            if not self._over:
                self._new_connections.append((client, data))
                self._wakeup.set()
                return
        client.close()

    def set_peers(self, peers: Sequence[str] | None) -> None:
        """Permit only these addresses and networks (None: all), and disconnect others. On any thread. Raises UserError
        if one of them is neither, and OSError if no thread is available for a store that was held."""
        if peers is not None:
            from rallypoint.store.transport import networks

            networks(peers)
        with self._lock:
            self._peers = [peers]
            if self._thread is not None:
                if not self._over:
                    self._wakeup.set()
            elif not self._closing:
                self._begin()  # the thread applies the peers before it serves anybody

    def close(self, most: float | None = None) -> None:
        """End all connections and stop listening. Everything is closed when this returns. Idempotent; on any thread.

        In a forked process, this only closes the fork's descriptors; the original store continues.

        Args:
            most: maximum seconds to wait: a finalizer might have interrupted any thread, including the store's own.
        """
        if os.getpid() != self._process:  # in a fork nobody would signal the end
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
            _logger.exception("an internal error ended %s, so its clients are being disconnected", self._name)
        finally:
            self._end(transport)
        if transport is not None:
            transport.release_memory()

    def _sleep(self, listener: socket.socket | None = None, seconds: float | None = None) -> None:
        """Wait for a client, a call from another thread, or at most `seconds`."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if listener is not None:
            poll.register(listener, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)

    def _open(self) -> StoreTransport | None:
        """Open the store once resources are available; None if it is closed before."""
        while not self._closing:
            try:
                from rallypoint.store.transport import StoreGuard, TransportContext

                guard = self._guard or StoreGuard()
                guard = guard._replace(own_user=guard.own_user or self._own_user)
                return open_transport(TransportContext(self._listener, self._wakeup.fileno(), self._log_lines, guard))
            except (OSError, MemoryError, ImportError) as error:
                self._log_lines.warning("%s cannot serve yet; trying again in %g s: %s", self._name, RETRY, error)
                self._wakeup.clear()  # connected clients must also wait
                self._sleep(seconds=RETRY)
        return None

    def _apply_requests(self, transport: StoreTransport | None) -> TypeGuard[StoreTransport]:
        """Hand over new connections and peers. Returns whether the store is open and must still serve."""
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
            _logger.exception("an internal error while closing %s", self._name)
        with self._lock:
            self._release()
        for client, _ in self._new_connections:
            client.close()
        self._log_lines.summarize()
        self._ended.set()


class StoreServer(StoreThread):
    """A store for torch's TCPStore clients and ours; for `guard`, `own_user` and `held` see `StoreThread`.

    It listens on `host` (empty: all interfaces) and `port` (0: see the attribute), or on `listener`, which it closes.

    Raises:
        OSError: the port is taken, the address belongs to another machine, or no descriptors or threads are left.
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
    """Open a new store for the context: the one in C, if it was built.

    `RALLYPOINT_STORE=python` always selects the one in Python.
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
    """One new store per round behind one port, for servers that hand over connections by their first bytes.

    The next round cannot read a round's keys, although workers find both at the same address. For any thread.

    Args:
        guard: the allowed peers and their limits.
        own_user: see `StoreThread`.
    """

    def __init__(self, guard: StoreGuard | None = None, *, own_user: bool = False) -> None:
        self._guard = guard
        self._own_user = own_user
        self._peers: list[Sequence[str] | None] = []  # the allowed peers, if set
        self._lock = threading.Lock()
        self._current: StoreThread | None = None
        self._previous: list[StoreThread] = []
        self._closed = False

    def add_connection(self, client: socket.socket, data: bytes) -> None:
        """Serve a connection from which `data` was already read; close it if it cannot be served. Raises OSError if no
        descriptors or threads are left for a store."""
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
        """Connect new clients to a new, empty store; old connections keep theirs."""
        with self._lock:
            if self._current is not None:
                self._previous.append(self._current)
                self._current = None

    def set_peers(self, peers: Sequence[str] | None) -> None:
        """Like `StoreThread.set_peers`, including later rounds."""
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
        """End all current and future connections. Idempotent."""
        with self._lock:
            self._closed = True
        self.next_round()
        self.end_previous()


# Servers that several stores in this process share on one port (`multi_tenant`, contract section 9.5).

_lock = threading.RLock()  # a finalizer might interrupt, and release a server
_servers: dict[int, list[StoreServer]] = {}  # each port's server, once for each store that uses it


def acquire_server(port: int) -> StoreServer:
    """Return the shared server on `port`; start it if needed. 0 always starts one. Raises OSError if another process
    has the port."""
    with _lock:
        users = _servers.get(port)
        server = users[0] if users else StoreServer(port=port)
        _servers.setdefault(server.port, []).append(server)
        return server


def release_server(server: StoreServer) -> bool:
    """Note that a store no longer uses `server`. Returns whether no store does, so that the caller must close it."""
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
    """Stop serving in a forked process: the listening sockets belong to the original process."""
    global _lock
    _lock = threading.RLock()
    _servers.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
