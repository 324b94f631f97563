"""A rendezvous as third parties write them, which must be polled. Nodes count themselves over a store."""

from __future__ import annotations

from rallypoint.agent.loop import run_agent
from rallypoint.agent.spec import RunResult
from rallypoint.agent.workers import WorkerController
from rallypoint.compat.agent import ElasticAgent
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from rallypoint.store.api import Store
from rallypoint.store.prefix import PrefixStore


class CountingHandler(RendezvousHandler):
    """Rounds of exactly `size` nodes, ranked in the order in which they join."""

    def __init__(self, store: Store, run_id: str, size: int, address: str = "") -> None:
        self._store = store
        self._run_id = run_id
        self._size = size
        self._address = address
        self._round = -1
        self.shut = 0

    def get_backend(self) -> str:
        return "counting"

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        rank = self._joined(self._round, 1) - 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        if rank == self._size - 1:
            store.set("full", "yes")
        store.wait(["full"])
        where = RendezvousStoreInfo(self._address, 1234) if self._address else None
        return RendezvousInfo(store, rank, self._size, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return self._joined(self._round + 1, 0)

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.shut += 1
        return True

    def _joined(self, round_: int, more: int) -> int:
        return self._store.add(f"{self._run_id}/{round_}/joined", more)


class RaisingHandler(CountingHandler):
    """A handler whose rendezvous fails."""

    def __init__(self, store: Store, error: BaseException) -> None:
        super().__init__(store, "raising", 1)
        self._error = error

    def next_rendezvous(self) -> RendezvousInfo:
        raise self._error


def outcome(agent: WorkerController | ElasticAgent) -> RunResult:
    """The result of an agent that takes part."""
    result = run_agent(agent) if isinstance(agent, WorkerController) else agent.run()
    assert result is not None, "it was a spare"
    return result
