"""Where the control plane is: at an endpoint that its user has named, or wherever the arbiter was last elected."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from rallypoint.base.endpoint import Endpoint
from rallypoint.rendezvous.state import NodeId

if TYPE_CHECKING:
    from rallypoint.base.tls import Tls


class Place(NamedTuple):
    """Where a control server listens, the key that its nodes share with it, and its TLS, if any."""

    endpoint: Endpoint
    key: bytes | None = None
    tls: Tls | None = None


class Whereabouts(Protocol):
    """What a link asks before each attempt. All of it is called on the loop's thread and must not block.

    As a string, it says where to look, for the sentences that a person reads.
    """

    lasting: bool
    """Whether what listens there is there to stay: if not, a stranger at that port may be gone at the next look."""
    advice: str
    """What to do if nobody is found, for the end of a sentence."""

    def find(self) -> Place | None:
        """Where the control server is now; None while nobody knows.

        Raises:
            HandshakeError: it cannot be known, and waiting will not help.
        """
        ...

    def why_not(self) -> str:
        """What there is to say while nobody knows."""
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
    advice = "check --rdzv-endpoint, and that the node that hosts it has started"

    def __init__(self, place: Place) -> None:
        self._place = place

    def __str__(self) -> str:
        return str(self._place.endpoint)

    def find(self) -> Place | None:
        """The place."""
        return self._place

    def why_not(self) -> str:
        """Nothing: it is known."""
        return ""

    def greeted(self, node: NodeId, incarnation: str) -> None:
        """Nobody else needs to know the name."""

    def failed(self, place: Place, error: Exception) -> None:
        """It may be there yet."""
