"""Where the control plane is: at an endpoint that its user has named, or wherever the coordinator was last elected."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.endpoint import Endpoint, is_local_address
from rallypoint.membership.state import NodeId

if TYPE_CHECKING:
    from rallypoint.base.tls import ControlTls


class DialTarget(NamedTuple):
    """Where a control server listens, the key that its nodes share with it, its TLS, and how its user has named it."""

    endpoint: Endpoint
    key: bytes | None = None
    tls: ControlTls | None = None
    flag: str = "--rdzv-endpoint"


class EndpointResolver:
    """What a link asks before each attempt. All of it is called on the loop's thread and must not block.

    As a string, it says where to look, for the sentences that a person reads.
    """

    is_permanent = False
    """Whether what listens there is there to stay: if not, another service at that port may be gone at the next
    attempt."""

    @property
    def advice(self) -> str:
        """What to do if nobody is found, for the end of a sentence."""
        raise NotImplementedError

    def resolve(self) -> DialTarget | None:
        """Where the control server is now; None while nobody knows.

        Raises:
            HandshakeError: it cannot be known, and waiting will not help.
        """
        raise NotImplementedError

    def unresolved_reason(self) -> str:
        """What there is to say while nobody knows."""
        return ""

    def resolved(self, addresses: list[str]) -> None:
        """The place's name stands for these numeric addresses now, and is about to be tried.

        Called only where its server may be one that lives inside an agent of the job: a new one may then be opened
        there. That of a control plane outside the job is nobody's to replace.
        """

    def session_opened(self, node: NodeId, incarnation: str) -> None:
        """A session is open, in which this node is called so, with the coordinator of that name."""

    def failed(self, place: DialTarget, error: Exception) -> None:
        """No session could be opened there."""


class FixedEndpoint(EndpointResolver):
    """One place, for good."""

    is_permanent = True

    def __init__(self, place: DialTarget) -> None:
        self.target = place

    @property
    def advice(self) -> str:
        return f"check {self.target.flag}, and that the node that hosts it has started"

    def __str__(self) -> str:
        return str(self.target.endpoint)

    def resolve(self) -> DialTarget | None:
        return self.target


class InferredHost(FixedEndpoint):
    """One place, whose host is the node that finds its own address behind the name, whenever it does."""

    def __init__(self, place: DialTarget, stand_in: Callable[[bool], None]) -> None:
        """`stand_in` opens a server there if nobody has one; it is told whether there was one that has been lost."""
        super().__init__(place)
        self._host_here = stand_in
        self._session_seen = False
        self._seems_unhosted = False
        """Whether the last attempt has shown that nobody hosts: refused, or the name stands for nothing."""

    @property
    def advice(self) -> str:
        if not self._seems_unhosted:
            return super().advice
        return (
            f"no node takes itself for {self.target.endpoint.host}; set is_host=true on one (--rdzv-conf) if that is a "
            f"virtual address, else {super().advice}"
        )

    def resolved(self, addresses: list[str]) -> None:
        """Host, if one of them is ours."""
        if any(map(is_local_address, addresses)):
            self._host_here(self._session_seen)

    def session_opened(self, node: NodeId, incarnation: str) -> None:
        """Somebody hosts."""
        self._session_seen = True

    def failed(self, place: DialTarget, error: Exception) -> None:
        """Nobody hosts yet, or something is between us and them."""
        self._seems_unhosted = isinstance(error, ConnectionRefusedError | socket.gaierror)
