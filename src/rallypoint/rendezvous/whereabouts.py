"""Where the control plane is: at an endpoint that its user has named, or wherever the arbiter was last elected."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rallypoint.base.endpoint import Endpoint, is_here
from rallypoint.rendezvous.state import NodeId

if TYPE_CHECKING:
    from rallypoint.base.tls import Tls


class Place(NamedTuple):
    """Where a control server listens, the key that its nodes share with it, its TLS, and how its user has named it."""

    endpoint: Endpoint
    key: bytes | None = None
    tls: Tls | None = None
    flag: str = "--rdzv-endpoint"


class Whereabouts(Protocol):
    """What a link asks before each attempt. All of it is called on the loop's thread and must not block.

    As a string, it says where to look, for the sentences that a person reads.
    """

    lasting: bool
    """Whether what listens there is there to stay: if not, a stranger at that port may be gone at the next look."""

    @property
    def advice(self) -> str:
        """What to do if nobody is found, for the end of a sentence."""
        ...

    def find(self) -> Place | None:
        """Where the control server is now; None while nobody knows.

        Raises:
            HandshakeError: it cannot be known, and waiting will not help.
        """
        ...

    def why_not(self) -> str:
        """What there is to say while nobody knows."""
        ...

    def resolved(self, addresses: list[str]) -> None:
        """The place's name stands for these numeric addresses now, and is about to be tried.

        Called only where its server may be one that lives inside an agent of the job: a new one may then be opened
        there. That of a control plane outside the job is nobody's to replace.
        """
        ...

    def greeted(self, node: NodeId, incarnation: str) -> None:
        """A session is open, in which this node is called so, with the arbiter of that name."""
        ...

    def failed(self, place: Place, error: Exception) -> None:
        """No session could be opened there."""
        ...


class Fixed:
    """One place, for good."""

    lasting = True

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def advice(self) -> str:
        """What to do if nobody is found there."""
        return f"check {self.place.flag}, and that the node that hosts it has started"

    def __str__(self) -> str:
        return str(self.place.endpoint)

    def find(self) -> Place | None:
        """The place."""
        return self.place

    def why_not(self) -> str:
        """Nothing: it is known."""
        return ""

    def resolved(self, addresses: list[str]) -> None:
        """Who hosts is settled."""

    def greeted(self, node: NodeId, incarnation: str) -> None:
        """Nobody else needs to know the name."""

    def failed(self, place: Place, error: Exception) -> None:
        """It may be there yet."""


class Inferred(Fixed):
    """One place, whose host is the node that finds its own address behind the name, whenever it does."""

    def __init__(self, place: Place, stand_in: Callable[[bool], None]) -> None:
        """`stand_in` opens a server there if nobody has one; it is told whether there was one that has been lost."""
        super().__init__(place)
        self._stand_in = stand_in
        self._met = False
        self._nobody = False
        """Whether the last attempt has shown that nobody hosts: refused, or the name stands for nothing."""

    @property
    def advice(self) -> str:
        """What to do if nobody is found there."""
        if not self._nobody:
            return super().advice
        return (
            f"no node takes itself for {self.place.endpoint.host}; set is_host=true on one (--rdzv-conf) if that is a "
            f"virtual address, else {super().advice}"
        )

    def resolved(self, addresses: list[str]) -> None:
        """Host, if one of them is ours."""
        if any(map(is_here, addresses)):
            self._stand_in(self._met)

    def greeted(self, node: NodeId, incarnation: str) -> None:
        """Somebody hosts."""
        self._met = True

    def failed(self, place: Place, error: Exception) -> None:
        """Nobody hosts yet, or something is between us and them."""
        self._nobody = isinstance(error, ConnectionRefusedError | socket.gaierror)
