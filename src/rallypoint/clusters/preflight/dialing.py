"""The network side of checks, with its own time limits: look-ups, connections, and greetings between nodes."""

from __future__ import annotations

import errno
import os
import queue
import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.endpoint import is_local_address, listening_address, listening_socket, resolve
from rallypoint.clusters.preflight.mesh import MAX_GREETING, MeshNode, greeting, why_another

LOOK_UP = 6.0
"""Seconds for a look-up. The C library waits 5 seconds for a DNS server before it asks the next one."""
SLOW = 2.0
"""A look-up that takes at least this many seconds is slow: some DNS server does not answer."""
CONNECT = 3.0
"""Seconds for a TCP connection."""
DIAL_TIMEOUT = 5.0
"""Seconds to connect to a node and receive its greeting. A lost packet is sent again after 1 s, and after 3 s."""


class LookUp(NamedTuple):
    addresses: tuple[str, ...] = ()
    error: str = ""
    took: float = 0.0

    @property
    def unanswered(self) -> bool:
        """Whether no answer arrived about the name, not even that it is unknown."""
        return not self.addresses and not self.error


def look_up(host: str, seconds: float = LOOK_UP) -> LookUp:
    """Look up a name within `seconds`; the C library has no such limit."""
    began = SYSTEM_CLOCK.monotonic()
    answers = queue.SimpleQueue[LookUp]()

    def ask() -> None:
        try:
            answers.put(LookUp(tuple(resolve(host))))
        except OSError as error:
            answers.put(LookUp(error=error.strerror or str(error)))

    threading.Thread(target=ask, daemon=True, name="preflight").start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        answer = LookUp()
    return answer._replace(took=SYSTEM_CLOCK.monotonic() - began)


class DialOutcome(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    NO_ROUTE = "no route"
    """This machine has no route to the address, for example an IPv6 address without IPv6 here."""


_OUTCOMES = {
    0: DialOutcome.ACCEPTED,
    errno.ECONNREFUSED: DialOutcome.REFUSED,
    errno.ETIMEDOUT: DialOutcome.SILENT,
    errno.ENETUNREACH: DialOutcome.NO_ROUTE,
    errno.EADDRNOTAVAIL: DialOutcome.NO_ROUTE,
}


class Attempt(NamedTuple):
    """One address, and what happened when connecting to it; `words` are the kernel's."""

    address: str
    outcome: DialOutcome
    words: str = ""
    greeting: bytes | None = None
    """Bytes that the peer sent first; None if it sent none and the connection is still open."""


def attempt_all(addresses: Sequence[tuple[str, int]], seconds: float = CONNECT, *, greeted: int = 0) -> list[Attempt]:
    """Connect to all addresses at once, read a line of up to `greeted` bytes from each, and close the connections."""
    deadline = Deadline.after(seconds)
    attempts = [Attempt(address, DialOutcome.SILENT) for address, _ in addresses]
    with ExitStack() as opened, selectors.DefaultSelector() as selector:

        def connected(number: int, connection: socket.socket, code: int) -> None:
            words = os.strerror(code) if code else ""
            attempts[number] = Attempt(addresses[number][0], _OUTCOMES.get(code, DialOutcome.UNREACHABLE), words)
            if code == 0 and greeted:
                selector.register(connection, selectors.EVENT_READ, (number, connection))

        for number, (address, port) in enumerate(addresses):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                connection = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.setblocking(False)
                code = connection.connect_ex((address, port))
            except OSError as error:  # this machine lacks the address family
                attempts[number] = Attempt(address, DialOutcome.NO_ROUTE, error.strerror or str(error))
                continue
            if code == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, (number, connection))
            else:
                connected(number, connection, code)
        while selector.get_map() and not deadline.expired:
            for key, events in selector.select(deadline.remaining()):
                number, connection = key.data
                if events & selectors.EVENT_WRITE:
                    selector.unregister(connection)
                    connected(number, connection, connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                    continue
                data = b""
                with suppress(OSError):
                    data = connection.recv(greeted)
                read = (attempts[number].greeting or b"") + data
                attempts[number] = attempts[number]._replace(greeting=read)
                if not data or len(read) >= greeted or read.endswith(b"\n"):
                    selector.unregister(connection)
    return attempts


# Nodes of a round


class Target(NamedTuple):
    who: MeshNode
    address: str
    port: int


def dial_all(targets: Sequence[Target], own: MeshNode, timeout: float = DIAL_TIMEOUT) -> dict[int, str]:
    """Dial nodes in the round of `own`, all at once, and wait for their greetings. Returns unreached nodes with
    reasons.
    """
    failures: dict[int, str] = {}
    places: list[tuple[MeshNode, tuple[str, int]]] = []
    for target in targets:
        try:
            places.append((target.who, (resolve(target.address)[0], target.port)))
        except OSError as error:
            failures[target.who.group_rank] = f"its address cannot be resolved: {error.strerror}"
    attempts = attempt_all([place for _, place in places], timeout, greeted=MAX_GREETING)
    for (who, _), attempt in zip(places, attempts, strict=True):
        if why := _why_not_reached(who, own, attempt):
            failures[who.group_rank] = why
    return failures


def _why_not_reached(who: MeshNode, own: MeshNode, attempt: Attempt) -> str:
    if attempt.outcome is DialOutcome.ACCEPTED:
        if attempt.greeting is None:
            return "the connection was accepted, but nothing answers"
        return why_another(who, attempt.greeting)
    why = (attempt.words or os.strerror(errno.ETIMEDOUT)).lower()
    if attempt.outcome is not DialOutcome.SILENT and who.node != own.node and is_local_address(attempt.address):
        why += f" ({attempt.address} is an address of {own.node} too)"
    return why


class MeshListener:
    """Greets the nodes that dial this one; early nodes wait in the kernel's queue until `serve`.

    `host` is where others reach this node, if known. Raises OSError if no port is free.
    """

    def __init__(self, host: str, *, only_here: bool) -> None:
        self._sock = listening_socket(listening_address(host, only_here=only_here) if host else "", 0)
        self._sock.setblocking(True)
        self.port = int(self._sock.getsockname()[1])

    def serve(self, own: MeshNode) -> None:
        """Greet as this node until `close`, on a separate thread."""
        while True:
            try:
                visitor, _ = self._sock.accept()
            except ConnectionAbortedError:  # the client has disconnected
                continue
            except OSError:
                return
            with visitor, suppress(OSError):
                visitor.setblocking(False)
                visitor.send(greeting(own))

    def close(self) -> None:
        """Stop listening. Idempotent; from any thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # this ends any `accept`
        self._sock.close()
