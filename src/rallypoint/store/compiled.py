"""The store in C (`native/`) in the place of `polling.PolledSockets`: the same laws and the same log lines.

While it works it holds no lock of the interpreter. What Python adds is what is seldom needed: the sentence for a
connection that is refused, and the time after which to accept again.
"""

from __future__ import annotations

import os
import socket

from rallypoint.store import _native
from rallypoint.store.carrying import RETRY, Later, log_refusal, log_starvation, peer_of, ready_to_listen
from rallypoint.store.errors import StoreProtocolError

# `Reason` in native/core.h.
_LONG_KEY, _LONG_VALUE, _MANY_KEYS, _WRONG_MAGIC = range(1, 5)
_NO_GREETING, _GREETED_AGAIN, _UNKNOWN_OPCODE, _NO_NUMBER = range(5, 9)


class CompiledSockets:
    """A listening socket and the connections made through it; see `carrying.Carrier`."""

    def __init__(self, listener: socket.socket, later: Later) -> None:
        ready_to_listen(listener)
        self._listener = listener
        self._later = later
        self._closed = False
        self._sockets = _native.Sockets(listener.fileno(), _log_refusal, self._starved)
        self.fileno = self._sockets.fileno
        self.ready = self._sockets.ready

    def adopt(self, client: socket.socket) -> None:
        """Serve a socket that is connected already."""
        client.setblocking(False)
        self._sockets.adopt(client.fileno())
        client.detach()

    def close(self) -> None:
        """End all connections and stop listening."""
        self._closed = True
        self._sockets.close()
        self._listener.close()

    def _starved(self, error: int) -> None:
        log_starvation(os.strerror(error))
        self._later(RETRY, self._accept_again)

    def _accept_again(self) -> None:
        if not self._closed:
            self._sockets.accept_again()


def _log_refusal(descriptor: int, reason: int, number: int, first: bytes, second: bytes) -> None:
    client = socket.socket(fileno=descriptor)
    try:
        log_refusal(peer_of(client), _refusal(reason, number, first, second))
    finally:
        client.detach()


def _refusal(reason: int, number: int, first: bytes, second: bytes) -> StoreProtocolError:
    """The error for a reason; `first` and `second` are the bytes that it is about."""
    from rallypoint.store import decoder, table, wire

    strange = {
        _NO_GREETING: decoder.NO_GREETING,
        _GREETED_AGAIN: decoder.GREETED_AGAIN,
        _UNKNOWN_OPCODE: decoder.UNKNOWN_OPCODE,
    }
    if reason in strange:
        return decoder.strange(strange[reason], first)
    if reason == _WRONG_MAGIC:
        return decoder.wrong_magic(number)
    if reason == _NO_NUMBER:
        return table.no_number(second, first)
    check = {_LONG_KEY: wire.check_key, _LONG_VALUE: wire.check_payload, _MANY_KEYS: wire.check_count}[reason]
    try:
        check(number)
    except StoreProtocolError as error:
        return error
    raise AssertionError(f"{number} was refused for reason {reason} and is within the limit")
