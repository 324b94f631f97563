"""Finds the control plane: at an endpoint that its user has named, or where the coordinator was last elected."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.endpoint import Endpoint, is_local_address
from rallypoint.membership.state import NodeId

if TYPE_CHECKING:
    from rallypoint.base.tls import ControlTls


class DialTarget(NamedTuple):
    """Where a control server listens, the key that its nodes share with it, its TLS, and its name for messages."""

    endpoint: Endpoint
    key: bytes | None = None
    tls: ControlTls | None = None
    flag: str = "--rdzv-endpoint"


class EndpointResolver:
    """Asked by a link before each attempt. All methods are called on the loop's thread and must not block.

    As a string, it says where to look, for messages.
    """

    is_permanent = False
    """Whether the service there is permanent: if not, a foreign service at that port may be gone at the next attempt.
    """

    @property
    def advice(self) -> str:
        """What to do if no server is found, for the end of a sentence."""
        raise NotImplementedError

    def resolve(self) -> DialTarget | None:
        """Where the control server is now; None while that is not known.

        Raises:
            HandshakeError: it cannot be known, and waiting will not help.
        """
        raise NotImplementedError

    def unresolved_reason(self) -> str:
        """The message while that is not known."""
        return ""

    def resolved(self, addresses: list[str]) -> None:
        """The name resolves to these numeric addresses now, which are about to be tried.

        Called only if the server may be one inside an agent of the job: a new one may then be opened there. An agent
        never replaces a control plane outside the job.
        """

    def session_opened(self, node: NodeId, incarnation: str) -> None:
        """A session is open, in which this node has this name, with the coordinator of that name."""

    def failed(self, place: DialTarget, error: Exception) -> None:
        """No session could be opened there."""


class FixedEndpoint(EndpointResolver):
    """One fixed place."""

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
        """`stand_in` opens a server there if there is none; its argument says whether an earlier one was lost."""
        super().__init__(place)
        self._host_here = stand_in
        self._session_seen = False
        self._seems_unhosted = False
        """Whether the last attempt has shown that there is no server: it was refused, or the name does not resolve."""

    @property
    def advice(self) -> str:
        if not self._seems_unhosted:
            return super().advice
        return (
            f"no node takes itself for {self.target.endpoint.host}; set is_host=true on one (--rdzv-conf) if that is a "
            f"virtual address, else {super().advice}"
        )

    def resolved(self, addresses: list[str]) -> None:
        """Open the server, if one of the addresses is ours."""
        if any(map(is_local_address, addresses)):
            self._host_here(self._session_seen)

    def session_opened(self, node: NodeId, incarnation: str) -> None:
        """There is a server."""
        self._session_seen = True

    def failed(self, place: DialTarget, error: Exception) -> None:
        """There is no server yet, or it cannot be reached."""
        self._seems_unhosted = isinstance(error, ConnectionRefusedError | socket.gaierror)
