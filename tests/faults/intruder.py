"""A third host that is no member: sockets in its network namespace, and the intruder's half of a control connection."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import (
    Challenge,
    ClientHandshake,
    HandshakeRefused,
    Proof,
    Welcome,
)
from rallypoint.control.protocol.signing import transcript_of
from tests.faults.network import Host

TIMEOUT = 120.0
_NETWORK = 0x40000000  # CLONE_NEWNET

T = TypeVar("T")


def on(host: Host, make: Callable[[], T]) -> T:
    """What `make` returns, called in the host's network namespace; sockets that it makes stay there."""
    made: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with open(f"/run/netns/{host.namespace}", "rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)  # a namespace is a thread's own
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def dial(host: Host | None, address: tuple[str, int]) -> socket.socket:
    """A connection from a host; from this machine's own loopback where it is None."""

    def make() -> socket.socket:
        return socket.create_connection(address, timeout=TIMEOUT)

    return make() if host is None else on(host, make)


class Intruder:
    """A connection to a control plane, by somebody who has the program and may not have the secret."""

    def __init__(self, host: Host | None, address: tuple[str, int]) -> None:
        self.socket = dial(host, address)
        self._frames = FrameReader()
        self._unread: list[bytes] = []

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def says(self, data: bytes) -> None:
        """Send bytes as they are; that nobody takes them is no error."""
        with suppress(OSError):
            self.socket.sendall(data)

    def sends(self, message: object) -> None:
        """Send a message, unsigned."""
        self.says(frame(codec.encode(message)))

    def hears(self) -> bytes | None:
        """The next frame; None when the other side has disconnected."""
        while not self._unread:
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                raise AssertionError(f"nothing was said for {TIMEOUT:.0f} s, and nothing was closed") from None
            except OSError:
                return None
            if not data:
                return None
            self._unread += self._frames.feed(data)
        return self._unread.pop(0)

    def is_disconnected(self) -> bool:
        """Whether the other side ends the connection, whatever it says before that."""
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:  # by a reset
            pass
        return True

    def greets(
        self, settings: Settings, key: bytes | None = None, proves: bytes | None = None, *, watcher: bool = False
    ) -> Welcome | str:
        """Shake hands as a node does.

        Args:
            settings: what it asks of the job.
            key: the key that it has.
            proves: what it sends in the place of the proof.
            watcher: whether it greets as a watcher.

        Returns:
            The welcome, or why there is none.
        """
        handshake = ClientHandshake(settings.run_id, key, os.urandom(16), settings, is_watcher=watcher)
        hello = codec.encode(handshake.hello("10.77.0.9", NodeId("10.77.0.9", 4711, 0, "intruder")))
        self.says(MAGIC + frame(hello))
        heard = self.hears()
        if heard is not None and isinstance(codec.decode_answer(heard), Challenge):
            proof = handshake.prove(transcript_of(hello, heard))
            self.sends(proof if proves is None else Proof(proves))
            heard = self.hears()
        if heard is None:
            return "disconnected"
        final = codec.decode_answer(heard if handshake.signers is None else _unsigned(heard))
        return final.sentence if isinstance(final, HandshakeRefused) else final  # type: ignore[return-value]


def _unsigned(payload: bytes) -> bytes:
    """A refusal is never signed; a welcome is."""
    try:
        codec.decode_answer(payload)
    except codec.CodecError:
        return payload[16:]
    return payload
