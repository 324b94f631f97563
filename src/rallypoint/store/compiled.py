"""The store in C (`native/`) in the place of `polling.PollingTransport`: the same laws and the same log lines.

While it works it holds no lock of the interpreter. Python adds what is seldom needed: the sentence for a
connection that is refused or cannot be accepted.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence

from rallypoint.store import _native, decoder, guard, table, wire
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.guard import SINGLE_ADDRESS_BITS, networks
from rallypoint.store.transport_context import (
    TransportContext,
    log_refusal,
    peer_of,
    raise_descriptor_limit,
    reserved_from,
    set_options,
)

if getattr(_native, "INTERFACE", 0) != 4:
    raise ImportError("it was built from other sources; install again, or run `python build_native.py`")

# `Reason` in native/store.h.
_LONG_KEY, _LONG_VALUE, _MANY_KEYS, _WRONG_MAGIC, _NO_GREETING, _GREETED_AGAIN, _UNKNOWN_OPCODE, _NO_NUMBER = range(
    1, 9
)
_NO_MEMORY, _LONG_REQUEST, _GROWN_VALUE, _KEYS_OF_ONE, _BYTES_OF_ONE, _SILENT, _NOT_A_PEER = range(9, 16)


class CompiledTransport:
    """A store and the connections to it; see `transport.StoreTransport`."""

    def __init__(self, context: TransportContext) -> None:
        listener, granted = -1, context.guard
        if context.listener is not None:
            set_options(context.listener, granted)
            listener = context.listener.fileno()
        self._context = context
        self._peers = granted.peers
        self._descriptors = reserved_from()
        first = context.retry, granted.validate_timeout
        limits = *first, granted.connections, granted.request, granted.value, granted.keys, granted.bytes
        self._sockets = _native.Sockets(
            listener, context.wakeup_fd, self._descriptors, limits, self._refused, self._on_cannot_accept
        )
        self.serve = self._sockets.serve
        self.run_once = self._sockets.run_once
        self.close = self._sockets.close
        self.release_memory = self._sockets.release_memory
        self.set_peers(granted.peers)

    def add_connection(self, client: socket.socket, data: bytes = b"") -> None:
        set_options(client, self._context.guard)
        try:
            self._sockets.add_connection(client.fileno(), data)
        except OSError as error:
            if error.errno != errno.EPERM:  # else it was logged
                log_refusal(self._context.log_lines, peer_of(client), error)
            client.close()
        else:
            client.detach()

    def set_peers(self, peers: Sequence[str] | None) -> None:
        found = networks(peers)
        self._peers = peers
        packed = None
        if found is not None:  # single addresses, which may be many, come first
            ordered = sorted(found, key=lambda each: each.bits < SINGLE_ADDRESS_BITS)
            packed = b"".join(each.address + bytes([each.bits]) for each in ordered)
        self._sockets.set_peers(packed)

    def _refused(self, descriptor: int, reason: int, number: int, first: bytes, second: bytes) -> None:
        client = socket.socket(fileno=descriptor)
        try:
            error = self._refusal(reason, number, first, second)
            log_refusal(self._context.log_lines, peer_of(client), error)
        finally:
            client.detach()

    def _refusal(self, reason: int, number: int, first: bytes, second: bytes) -> StoreProtocolError:
        """The error for a reason; `first` and `second` are the bytes that it is about."""
        limits = self._context.guard
        strange = {
            _NO_GREETING: decoder.NOT_VALIDATED,
            _GREETED_AGAIN: decoder.SECOND_VALIDATE,
            _UNKNOWN_OPCODE: decoder.UNKNOWN_OPCODE,
        }
        if reason in strange:
            return decoder.unexpected_request_error(strange[reason], first)
        errors: dict[int, Callable[[], StoreProtocolError]] = {
            _LONG_KEY: lambda: _error_raised_by(wire.check_key, number),
            _LONG_VALUE: lambda: _error_raised_by(wire.check_payload, number),
            _MANY_KEYS: lambda: _error_raised_by(wire.check_count, number),
            _LONG_REQUEST: lambda: _error_raised_by(wire.check_request, number, limits.request),
            _WRONG_MAGIC: lambda: decoder.wrong_magic_error(number),
            _NO_NUMBER: lambda: table.not_a_number_error(second, first),
            _NO_MEMORY: guard.out_of_memory_error,
            _GROWN_VALUE: lambda: guard.value_too_long_error(number, limits.value),
            _KEYS_OF_ONE: lambda: guard.too_many_keys_error(number, limits.keys),
            _BYTES_OF_ONE: lambda: guard.too_many_bytes_error(number, limits.bytes),
            _SILENT: lambda: guard.validate_timeout_error(limits.validate_timeout),
            _NOT_A_PEER: lambda: guard.peer_refused_error(self._peers or ()),
        }
        return errors[reason]()

    def _on_cannot_accept(self, error: int) -> int:
        self._descriptors = raise_descriptor_limit(self._context, error, self._descriptors)
        return self._descriptors


def _error_raised_by(check: Callable[..., None], *numbers: int) -> StoreProtocolError:
    """What a check raises that finds something beyond a limit."""
    try:
        check(*numbers)
    except StoreProtocolError as error:
        return error
    raise AssertionError(f"{numbers} was refused and is within the limit of {check}")
