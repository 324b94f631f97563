"""What an agent needs of a rendezvous: to ask without waiting, and to be told.

`ElasticHandler` offers it by itself. For any other handler `agent.polling_client` makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rallypoint.failures.cause import Cause
from rallypoint.protocol.messages import Deliver, Placement
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import RendezvousInfo

if TYPE_CHECKING:
    from rallypoint.agent.spec import WorkerSpec


class RendezvousClient(Protocol):
    """See `rendezvous.elastic.ElasticHandler` for what each method means. None of them waits for other nodes."""

    def listen(self, deliver: Deliver | None) -> None:
        """Hand every notice to `deliver`."""

    def join(self, role: str, local_world_size: int, max_restarts: int = -1, program: str = "") -> None:
        """Ask for a place in the next round."""

    def begin_round(self, placement: Placement) -> None:
        """The workers of the round before are gone; this round's begin."""

    def info(self, placement: Placement) -> RendezvousInfo:
        """A placement as torch's users know it."""

    def report_failure(self, round_: int, cause: Cause, max_restarts: int) -> None:
        """A worker has failed."""

    def report_success(self, round_: int) -> None:
        """All workers of this node have succeeded."""

    @property
    def notice_timeout(self) -> float:
        """Seconds that workers are given to acknowledge a notice before the round is drained; 0: they are not asked."""

    @property
    def hosts_coordinator(self) -> bool:
        """Whether the coordinator of the job is in this agent at the moment."""

    def drain(self, round_: int) -> None:
        """End the round in order; where workers are asked first, this node's consent to that."""

    def preempt(self, round_: int, seconds: float) -> None:
        """This node will be taken away in so many seconds: the others are to save before that."""

    def leave(self, asks: bool = False) -> None:
        """Take no part any more. With `asks`, have a `LeaveReply` notice sent, whenever and however often this is
        called."""

    def ask_progress(self) -> None:
        """Have a `WriteProgress` notice sent."""

    def shutdown(self) -> bool:
        """Release everything; the job goes on without this node. Returns whether that went well."""


def membership_of(spec: WorkerSpec, exit_barrier_timeout: float = 300) -> RendezvousClient:
    """The membership of a node that meets the others by the handler of its spec.

    Args:
        spec: what the node runs.
        exit_barrier_timeout: seconds that a handler which can only be asked waits for other nodes at the end. With ours
            the wait ends with the verdict, however long that takes.
    """
    if isinstance(spec.rdzv_handler, ElasticHandler):
        return spec.rdzv_handler
    from rallypoint.agent.polling_client import PollingRendezvousClient

    return PollingRendezvousClient(spec, exit_barrier_timeout)
