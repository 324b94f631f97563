"""The interface that an agent needs of a rendezvous: sending requests without waiting, and being notified.

`ElasticHandler` implements it. For any other handler `agent.third_party` does.
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
    """See `rendezvous.elastic.ElasticHandler`. No method waits for other nodes. The defaults are those of a rendezvous
    whose nodes have no coordinator in common.
    """

    def listen(self, deliver: Deliver | None) -> None:
        """Pass every notification to `deliver`; None ends that."""

    def join(self, member: NodeInfo, *, keeps_place: bool = False) -> None:
        """Request a place in the next round for this node, described by the `NodeInfo`; with `keeps_place` that may
        hold for later rounds too (`RoundEnded.keeps_place`).
        """

    def keep_place(self) -> None:
        """This node keeps its place in the next round, without a request."""
        return

    def tell_next_store(self, round_: int) -> None:
        """This node serves the worker store of `round_`, whose workers run: tell where the next one would be."""
        return

    def begin_round(self, placement: Placement) -> None:
        """The workers of the previous round are gone; those of this round begin."""

    def info(self, placement: Placement) -> RendezvousInfo:
        """The placement of the round that was begun last, in the form that torch's users know."""

    def send(self, request: Request) -> None:
        """Send the coordinator a request other than a join."""

    @property
    def notice_timeout(self) -> float:
        """Seconds that workers are given to acknowledge a notice before the round is drained; 0: they get no notice."""
        return 0.0

    @property
    def keeps_workers(self) -> bool:
        """Whether nodes learn from each other whether their workers can continue in their processes after a round."""
        return False

    @property
    def lease(self) -> float:
        """Seconds of silence after which the others count this node as lost; infinite if they never do."""
        return math.inf

    @property
    def confirmed_at(self) -> float:
        """When this node last sent what shows, since it was answered, that the others count on it (`BOOT_CLOCK`)."""
        return -math.inf

    @property
    def hosts_coordinator(self) -> bool:
        """Whether the coordinator of the job is in this agent at the moment."""
        return False

    def snapshot(self) -> Callable[[], Snapshot] | None:
        """A function, for any thread, that makes the snapshot of the job as it is at this moment; None if the job's
        coordinator is not in this agent.
        """
        return None

    def local_job(self) -> LocalJob | None:
        """The address at which commands on this machine find the job's coordinator, empty before `open_to_commands`;
        None if they cannot.
        """
        return None

    def open_to_commands(self) -> socket.socket | None:
        """A listening socket on loopback, opened at the first call, if the coordinator is in this agent and has no
        server, which nodes do not need: when it is readable, `serve_commands` is due. Else None. From any thread.
        Raises OSError.
        """
        return None

    def serve_commands(self) -> None:
        """Start a server there, unless there is one. Takes memory, and time for imports. From any thread but the
        loop's. Raises OSError or RallypointError.
        """
        return

    def shutdown(self) -> bool:
        """Release everything; the job continues without this node. Returns whether that went well."""
