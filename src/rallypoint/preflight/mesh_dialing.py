"""Dialing other nodes, many at once, and answering those that dial."""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.endpoint import is_local_address, listening_address, listening_socket, resolve
from rallypoint.preflight.mesh_handshake import MAX_ANSWER, QUESTION_BYTES, MeshNode, answer, question, why_another

DIAL_TIMEOUT = 5.0
"""Seconds for a connection and its answer: a lost packet is sent again after 1 s, and after 3."""
_MAX_VISITORS = 1024
"""Connections at once that are answered; more wait in the kernel's queue."""


class Target(NamedTuple):
    """A node to dial."""

    who: MeshNode
    address: str
    port: int


def dial_all(
    targets: Sequence[Target], own: MeshNode, stopped: int, timeout: float = DIAL_TIMEOUT, clock: Clock = SYSTEM_CLOCK
) -> dict[int, str]:
    """Dial them all at once, and wait for their answers.

    Args:
        targets: nodes of the round of `own`.
        own: this node.
        stopped: a descriptor that becomes readable when the result is of no more use.
        timeout: seconds for all.
        clock: on which it counts.

    Returns:
        Group rank to why it was not reached; nothing for those that were.
    """
    failures: dict[int, str] = {}
    dials: dict[int, _Dial] = {}
    poller = select.poll()
    poller.register(stopped, select.POLLIN)
    ends_at = clock.monotonic() + timeout
    try:
        for target in targets:
            dial = _Dial(target, own)
            if dial.done:
                dial.close()
                failures[target.who.group_rank] = dial.why
                continue
            dials[dial.fileno()] = dial
            poller.register(dial.fileno(), dial.events)
        while dials and (left := ends_at - clock.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000 + 1):
                if fd == stopped:
                    return failures
                dial = dials[fd]
                dial.go_on()
                if not dial.done:
                    poller.modify(fd, dial.events)
                    continue
                poller.unregister(fd)
                dials.pop(fd).close()
                if dial.why:
                    failures[dial.target.who.group_rank] = dial.why
        return failures | {each.target.who.group_rank: each.why_late for each in dials.values()}
    finally:
        for dial in dials.values():
            dial.close()


class _Dial:
    """One connection, from the dialing to the answer. `why` says why it has failed, once it is `done`."""

    def __init__(self, target: Target, own: MeshNode) -> None:
        self.target = target
        self.why = ""
        self.done = False
        self.events = select.POLLOUT
        self._own = own
        self._nonce = secrets.token_hex(16)
        self._answer = b""
        self._sock: socket.socket | None = None
        try:
            address = resolve(target.address)[0]
            self._address = address
            self._sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            self._sock.setblocking(False)
            code = self._sock.connect_ex((address, target.port))
            if code not in (0, errno.EINPROGRESS):
                self._fail(code)
        except socket.gaierror as error:
            self._end(f"its address cannot be resolved: {error.strerror}")
        except OSError as error:
            self._fail(error.errno or 0)

    def fileno(self) -> int:
        """Of the socket."""
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def why_late(self) -> str:
        """Why it has failed, if its time is over."""
        if self.events == select.POLLOUT:
            return os.strerror(errno.ETIMEDOUT).lower()
        return "the connection is made and nobody answers"

    def go_on(self) -> None:
        """The socket is ready."""
        assert self._sock is not None
        try:
            if self.events == select.POLLOUT:
                if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._fail(code)
                    return
                self._sock.send(question(self._nonce))
                self.events = select.POLLIN
                return
            data = self._sock.recv(MAX_ANSWER)
        except OSError as error:
            self._fail(error.errno or 0)
            return
        self._answer += data
        if not data or data.endswith(b"\n") or len(self._answer) >= MAX_ANSWER:
            self._end(why_another(self.target.who, self._nonce, self._answer))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._sock is not None:
            self._sock.close()

    def _fail(self, code: int) -> None:
        why = os.strerror(code).lower()
        if self.target.who.node != self._own.node and is_local_address(self._address):
            why += f" ({self._address} is an address of {self._own.node} too)"
        self._end(why)

    def _end(self, why: str) -> None:
        self.why, self.done = why, True


class MeshListener:
    """Answers the nodes that dial this one. Nothing blocks: its `fds` are waited for, and `step` is called.

    Args:
        host: where others reach this node, as far as that is known.
        only_here: whether all nodes are on this machine.

    Raises:
        OSError: no port is free.
    """

    def __init__(self, host: str, *, only_here: bool) -> None:
        self._sock = listening_socket(listening_address(host, only_here=only_here) if host else "", 0)
        self.port = int(self._sock.getsockname()[1])
        self.own: MeshNode | None = None
        """Who answers; nobody before that is known."""
        self._visitors: dict[int, tuple[socket.socket, bytes]] = {}

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        listening = [self._sock.fileno()] if len(self._visitors) < _MAX_VISITORS else []
        return [*listening, *self._visitors] if self.own is not None else []

    def step(self) -> None:
        """Take who comes, and answer who has asked."""
        if self.own is None:
            return
        for fd, (sock, before) in list(self._visitors.items()):
            try:
                data = sock.recv(QUESTION_BYTES - len(before))
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            asked = before + data
            if data and len(asked) < QUESTION_BYTES:
                self._visitors[fd] = (sock, asked)
                continue
            del self._visitors[fd]
            self._reply(sock, asked)
        self._accept()

    def _reply(self, sock: socket.socket, asked: bytes) -> None:
        assert self.own is not None
        with sock:
            try:
                sock.send(answer(self.own, asked))
            except OSError:
                return

    def _accept(self) -> None:
        while len(self._visitors) < _MAX_VISITORS:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # nobody is left who comes, or has gone again
                return
            sock.setblocking(False)
            self._visitors[sock.fileno()] = (sock, b"")

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._sock.close()
        for sock, _ in self._visitors.values():
            sock.close()
        self._visitors.clear()
