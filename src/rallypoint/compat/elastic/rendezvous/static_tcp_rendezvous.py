"""In the place of `torch.distributed.elastic.rendezvous.static_tcp_rendezvous`."""

from __future__ import annotations

from rallypoint.base.endpoint import Endpoint
from rallypoint.compat.reexports import reexports_of
from rallypoint.rendezvous.backends.static import create_handler as create_rdzv_handler
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.params import RendezvousParameters

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

__getattr__ = reexports_of(__name__)


class StaticTCPRendezvous(ElasticHandler):
    """A rendezvous of nodes whose ranks were given by hand.

    Args:
        master_addr: where the node of rank 0 is.
        master_port: where it listens.
        rank: this node's.
        world_size: how many nodes there are.
        run_id: the job's id.
        timeout: seconds for all to come.

    Raises:
        UserError: a rank that is none of so many nodes, or a time that is not positive.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int
    ) -> None:
        endpoint = str(Endpoint(master_addr, master_port))
        made = create_rdzv_handler(
            RendezvousParameters("static", endpoint, run_id, world_size, world_size, rank=rank, timeout=timeout)
        )
        vars(self).update(vars(made))
