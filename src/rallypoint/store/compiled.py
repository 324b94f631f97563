"""The store in C (`native/`) in the place of `polling.PolledSockets`: the same laws and the same log lines.

While it works it holds no lock of the interpreter. What Python adds is what is seldom needed: the sentence for a
connection that is refused or cannot be accepted.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence

from rallypoint.store import _native, decoder, guard, table, wire
from rallypoint.store.carrying import (
    Surroundings,
    first_descriptors,
    more_descriptors,
    peer_of,
    say_refusal,
    set_options,
)
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.guard import WHOLE, networks

if getattr(_native, "INTERFACE", 0) != 3:
    raise ImportError("it was built from other sources; install again, or run `python build_native.py`")

# `Reason` in native/core.h.
_LONG_KEY, _LONG_VALUE, _MANY_KEYS, _WRONG_MAGIC, _NO_GREETING, _GREETED_AGAIN, _UNKNOWN_OPCODE, _NO_NUMBER = range(
    1, 9
)
_NO_MEMORY, _LONG_REQUEST, _GROWN_VALUE, _KEYS_OF_ONE, _BYTES_OF_ONE, _SILENT, _NOT_A_PEER = range(9, 16)


class CompiledSockets:
    """A store and the connections to it; see `carrying.Carrier`."""

    def __init__(self, around: Surroundings) -> None:
        listener, granted = -1, around.guard
        if around.listener is not None:
            set_options(around.listener, granted)
            listener = around.listener.fileno()
        self._around = around
        self._peers = granted.peers
        self._descriptors = first_descriptors()
        first = around.retry, granted.greeting
        limits = *first, granted.connections, granted.request, granted.value, granted.keys, granted.bytes
        self._sockets = _native.Sockets(listener, around.wake, self._descriptors, limits, self._refused, self._starved)
        self.serve = self._sockets.serve
        self.turn = self._sockets.turn
        self.close = self._sockets.close
        self.free = self._sockets.free
        self.admit(granted.peers)

    def adopt(self, client: socket.socket, data: bytes = b"") -> None:
        """Serve a socket that is connected already, and from which this has been read."""
        set_options(client, self._around.guard)
        try:
            self._sockets.adopt(client.fileno(), data)
        except OSError as error:
            if error.errno != errno.EPERM:  # else it was told of
                say_refusal(self._around.lines, peer_of(client), error)
            client.close()
        else:
            client.detach()

    def admit(self, peers: Sequence[str] | None) -> None:
        """From now on only these may be connected; None: all may."""
        found = networks(peers)
        self._peers = peers
        packed = None
        if found is not None:  # single addresses, which may be many, come first
            ordered = sorted(found, key=lambda each: each.bits < WHOLE)
            packed = b"".join(each.address + bytes([each.bits]) for each in ordered)
        self._sockets.admit(packed)

    def _refused(self, descriptor: int, reason: int, number: int, first: bytes, second: bytes) -> None:
        client = socket.socket(fileno=descriptor)
        try:
            error = self._refusal(reason, number, first, second)
            say_refusal(self._around.lines, peer_of(client), error)
        finally:
            client.detach()

    def _refusal(self, reason: int, number: int, first: bytes, second: bytes) -> StoreProtocolError:
        """The error for a reason; `first` and `second` are the bytes that it is about."""
        limits = self._around.guard
        strange = {
            _NO_GREETING: decoder.NO_GREETING,
            _GREETED_AGAIN: decoder.GREETED_AGAIN,
            _UNKNOWN_OPCODE: decoder.UNKNOWN_OPCODE,
        }
        if reason in strange:
            return decoder.strange(strange[reason], first)
        errors: dict[int, Callable[[], StoreProtocolError]] = {
            _LONG_KEY: lambda: _raised(wire.check_key, number),
            _LONG_VALUE: lambda: _raised(wire.check_payload, number),
            _MANY_KEYS: lambda: _raised(wire.check_count, number),
            _LONG_REQUEST: lambda: _raised(wire.check_request, number, limits.request),
            _WRONG_MAGIC: lambda: decoder.wrong_magic(number),
            _NO_NUMBER: lambda: table.no_number(second, first),
            _NO_MEMORY: guard.no_memory,
            _GROWN_VALUE: lambda: guard.grown_value(number, limits.value),
            _KEYS_OF_ONE: lambda: guard.keys_of_one(number, limits.keys),
            _BYTES_OF_ONE: lambda: guard.bytes_of_one(number, limits.bytes),
            _SILENT: lambda: guard.silent(limits.greeting),
            _NOT_A_PEER: lambda: guard.no_peer(self._peers or ()),
        }
        return errors[reason]()

    def _starved(self, error: int) -> int:
        self._descriptors = more_descriptors(self._around, error, self._descriptors)
        return self._descriptors


def _raised(check: Callable[..., None], *numbers: int) -> StoreProtocolError:
    """What a check raises that finds something beyond a limit."""
    try:
        check(*numbers)
    except StoreProtocolError as error:
        return error
    raise AssertionError(f"{numbers} was refused and is within the limit of {check}")
