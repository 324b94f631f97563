"""A rendezvous plug-in of the group `torchrun.handlers`, written for torch."""

import os
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint


class Visiting(RendezvousHandler):
    """One node, whose store is its own."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.params = params
        host, port = parse_rendezvous_endpoint(params.endpoint, default_port=0)
        self.store: Any = TCPStore(host, port, is_master=True, wait_for_workers=False)
        self.round = 0

    def get_backend(self) -> str:
        return "visiting"

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        store = PrefixStore(f"{self.round}", self.store)
        mark = self.params.get("mark") + str(self.params.get_as_int("number"))
        os.environ["VISITED"] = f"{mark} {self.round} {self.params.min_nodes} {self.params.run_id}"
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "localhost"))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self.params.run_id)

    def shutdown(self) -> bool:
        return True


def offer() -> Any:
    return Visiting
