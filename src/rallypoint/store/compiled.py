"""The store in C (`native/`) in the place of `polling.PolledSockets`: the same laws and the same log lines.

While it works it holds no lock of the interpreter. What Python adds is what is seldom needed: the sentence for a
connection that is refused or cannot be accepted.
"""

from __future__ import annotations

import os
import socket

from rallypoint.store import _native
from rallypoint.store.carrying import Surroundings, peer_of, ready_to_listen, say_refusal, say_starvation
from rallypoint.store.errors import StoreProtocolError

if getattr(_native, "INTERFACE", 0) != 2:
    raise ImportError("it was built from other sources; install again, or run `python build_native.py`")

# `Reason` in native/core.h.
_LONG_KEY, _LONG_VALUE, _MANY_KEYS, _WRONG_MAGIC = range(1, 5)
_NO_GREETING, _GREETED_AGAIN, _UNKNOWN_OPCODE, _NO_NUMBER = range(5, 9)


class CompiledSockets:
    """A store and the connections to it; see `carrying.Carrier`."""

    def __init__(self, around: Surroundings) -> None:
        listener = -1
        if around.listener is not None:
            ready_to_listen(around.listener)
            listener = around.listener.fileno()
        self._around = around
        self._sockets = _native.Sockets(listener, around.wake, around.retry, self._refused, self._starved)
        self.serve = self._sockets.serve
        self.turn = self._sockets.turn
        self.close = self._sockets.close
        self.free = self._sockets.free

    def adopt(self, client: socket.socket, data: bytes = b"") -> None:
        """Serve a socket that is connected already, and from which this has been read."""
        client.setblocking(False)
        self._sockets.adopt(client.fileno(), data)
        client.detach()

    def _refused(self, descriptor: int, reason: int, number: int, first: bytes, second: bytes) -> None:
        client = socket.socket(fileno=descriptor)
        try:
            say_refusal(self._around.lines, peer_of(client), _refusal(reason, number, first, second))
        finally:
            client.detach()

    def _starved(self, error: int) -> None:
        say_starvation(self._around, os.strerror(error))


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
