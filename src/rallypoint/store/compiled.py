"""The store in C (`native/`), which replaces `plain.PlainTransport` and follows the same laws, with the same log lines.

It runs without the interpreter's lock. Python adds rare parts, such as the sentence about a connection that is refused
or cannot be accepted.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from rallypoint.base.descriptors import connection_limit
from rallypoint.base.netlink import Peer, PeerUsers
from rallypoint.store import _native, wire
from rallypoint.store.transport import (
    SINGLE_ADDRESS_BITS,
    TransportContext,
    log_refusal,
    networks,
    peer_of,
    raise_descriptor_limit,
    set_options,
    shown_peers,
)
from rallypoint.store.wire import RefusalReason, refusal

if getattr(_native, "INTERFACE", 0) != 5:
    raise ImportError("it was built from other sources; reinstall it, or run `python build_native.py`")


class CompiledTransport:
    """A store and the connections to it; see `transport.StoreTransport`."""

    def __init__(self, context: TransportContext) -> None:
        listener, granted = -1, context.guard
        if context.listener is not None:
            set_options(context.listener, granted)
            listener = context.listener.fileno()
        self._context = context
        self._peers = granted.peers
        self._users = PeerUsers()
        self._descriptors = connection_limit()
        first = context.retry, granted.validate_timeout
        limits = *first, granted.connections, granted.request, granted.value, granted.keys, granted.bytes
        self._sockets = _native.Sockets(
            listener,
            context.wakeup_fd,
            self._descriptors,
            limits,
            self._on_refusal,
            self._on_cannot_accept,
            self._is_other_user if granted.own_user else None,
        )
        self.serve = self._sockets.serve
        self.run_once = self._sockets.run_once
        self.release_memory = self._sockets.release_memory
        self.set_peers(granted.peers)

    def close(self) -> None:
        self._sockets.close()
        self._users.close()

    def add_connection(self, client: socket.socket, data: bytes = b"") -> None:
        set_options(client, self._context.guard)
        try:
            self._sockets.add_connection(client.fileno(), data)
        except OSError as error:
            if error.errno != errno.EPERM:  # otherwise the error was logged
                log_refusal(self._context.log_lines, peer_of(client), error)
            client.close()
        else:
            client.detach()

    def set_peers(self, peers: Sequence[str] | None) -> None:
        allowed = networks(peers)
        self._peers = peers
        packed = None
        if allowed is not None:  # single addresses, possibly many, come first
            ordered = sorted(allowed, key=lambda network: network.bits < SINGLE_ADDRESS_BITS)
            packed = b"".join(network.address + bytes([network.bits]) for network in ordered)
        self._sockets.set_peers(packed)

    def _on_refusal(self, descriptor: int, reason: int, number: int, first: bytes, second: bytes) -> None:
        client = socket.socket(fileno=descriptor)
        try:
            error = refusal(RefusalReason(reason), number, self._limit(RefusalReason(reason)), first, second)
            log_refusal(self._context.log_lines, peer_of(client), error)
        finally:
            client.detach()

    def _is_other_user(self, descriptor: int) -> bool:
        client = socket.socket(fileno=descriptor)
        try:
            return self._users.peer_of(client) is Peer.OTHER_USER
        finally:
            client.detach()

    def _limit(self, reason: RefusalReason) -> float | str:
        guard = self._context.guard
        limits: dict[RefusalReason, float | str] = {
            RefusalReason.LONG_KEY: wire.MAX_KEY,
            RefusalReason.LONG_VALUE: wire.MAX_PAYLOAD,
            RefusalReason.MANY_KEYS: wire.MAX_KEYS,
            RefusalReason.WRONG_MAGIC: wire.MAGIC,
            RefusalReason.LONG_REQUEST: guard.request,
            RefusalReason.GROWN_VALUE: guard.value,
            RefusalReason.KEYS_OF_ONE: guard.keys,
            RefusalReason.BYTES_OF_ONE: guard.bytes,
            RefusalReason.SILENT: guard.validate_timeout,
            RefusalReason.NOT_A_PEER: shown_peers(self._peers),
        }
        return limits.get(reason, 0)

    def _on_cannot_accept(self, error: int) -> int:
        self._descriptors = raise_descriptor_limit(self._context, error, self._descriptors)
        return self._descriptors
