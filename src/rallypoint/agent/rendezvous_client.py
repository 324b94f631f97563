"""The interface of a rendezvous to an agent, which sends requests without waiting and receives notifications.

`ElasticHandler` implements it. `agent.third_party` implements it for any other handler.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rallypoint.base.light_typing import TYPE_CHECKING, Protocol
from rallypoint.control.membership.state import NodeInfo
from rallypoint.control.protocol.messages import Deliver, Placement, Request
from rallypoint.rendezvous.handler import LocalJob, RendezvousInfo

if TYPE_CHECKING:
    import socket

    from rallypoint.observe.watching.messages import Snapshot


class RendezvousClient(Protocol):
    """See `rendezvous.elastic.ElasticHandler`. No method waits for other nodes. The defaults suit a rendezvous whose
    nodes share no coordinator."""

    def listen(self, deliver: Deliver | None) -> None:
        """Pass all notifications to `deliver`; None stops this."""

    def join(self, member: NodeInfo, *, keeps_place: bool = False) -> None:
        """Request a place in the next round for the node that `NodeInfo` describes. With `keeps_place` the place may
        also be for later rounds (`RoundEnded.keeps_place`)."""

    def keep_place(self) -> None:
        """Take this node's place in the next round without a request."""
        return

    def tell_next_store(self, round_: int) -> None:
        """Report where the next worker store would be: this node serves the store of `round_`, whose workers are
        running."""
        return

    def begin_round(self, placement: Placement) -> None:
        """Begin this round: the previous round's workers are gone."""

    def info(self, placement: Placement) -> RendezvousInfo:
        """Return the placement of the last round that began, in torch's form."""

    def send(self, request: Request) -> None:
        """Send the coordinator any request except a join."""

    @property
    def notice_timeout(self) -> float:
        """Seconds that workers have to acknowledge a notice before the round is drained; 0: they get no notice."""
        return 0.0

    @property
    def keeps_workers(self) -> bool:
        """Whether nodes tell each other if their workers can continue in their processes after a round."""
        return False

    @property
    def lease(self) -> float:
        """Seconds of silence after which the other nodes count this one as lost; infinite if they never do."""
        return math.inf

    @property
    def confirmed_at(self) -> float:
        """When the last answered request was sent: the other nodes counted on this node then (`BOOT_CLOCK`)."""
        return -math.inf

    @property
    def hosts_coordinator(self) -> bool:
        """Whether the job's coordinator currently runs in this agent."""
        return False

    def snapshot(self) -> Callable[[], Snapshot] | None:
        """Return a function, for any thread, that returns a current snapshot of the job; None if the job's coordinator
        is not in this agent."""
        return None

    def local_job(self) -> LocalJob | None:
        """Address at which commands on this machine find the job's coordinator, empty before `open_to_commands`; None
        if they cannot find it."""
        return None

    def open_to_commands(self) -> socket.socket | None:
        """Open a listening socket on loopback on the first call, if the coordinator runs in this agent without a server
        (nodes do not need one); else return None. When it is readable, call `serve_commands`. Any thread can call this.
        Raises OSError."""
        return None

    def serve_commands(self) -> None:
        """Start a server on that socket, unless one exists. Uses memory, and time for imports. Any thread except the
        loop's can call this. Raises OSError or RallypointError."""
        return

    def shutdown(self) -> bool:
        """Release everything; the job continues without this node. Returns whether this succeeded."""
