"""An agent of a third party, whose workers are threads, over a third party's rendezvous; both written for torch."""

import json
import signal
import sys
import threading
from typing import Any

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class Counting(RendezvousHandler):
    """Nodes are ranked in the order in which they come."""

    def __init__(self, store: Any, size: int) -> None:
        self.store, self.size, self.round = store, size, -1

    def get_backend(self) -> str:
        return "counting"

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        rank = self.store.add(f"round {self.round}", 1) - 1
        store = PrefixStore(f"round/{self.round}", self.store)
        return RendezvousInfo(store, rank, self.size, RendezvousStoreInfo.build(rank, store, "localhost"))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "counted"

    def shutdown(self) -> bool:
        return True


class Threads(SimpleElasticAgent):
    """Each worker is a thread; the first start of rank 1 fails."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, exit_barrier_timeout=30)
        self.threads: dict[int, threading.Thread] = {}
        self.values: dict[int, Any] = {}
        self.failures: dict[int, ProcessFailure] = {}
        self.starts = 0
        self.calls: list[str] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        self.values, self.failures = {}, {}
        for worker in worker_group.workers:
            thread = threading.Thread(target=self._work, args=(worker, self.starts))
            self.threads[worker.local_rank] = thread
        for thread in self.threads.values():
            thread.start()
        self.starts += 1
        return dict.fromkeys(self.threads, 1)

    def _work(self, worker: Any, start: int) -> None:
        if start == 0 and worker.global_rank % 2 == 1:
            self.failures[worker.global_rank] = ProcessFailure(worker.local_rank, 1, 1, "")
        else:
            self.values[worker.global_rank] = [worker.global_rank, worker.world_size, worker.role_rank, start]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")
        for thread in self.threads.values():
            thread.join()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(thread.is_alive() for thread in self.threads.values()):
            return RunResult(state=WorkerState.HEALTHY)
        if self.failures:
            return RunResult(state=WorkerState.FAILED, failures=self.failures)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=self.values)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.calls.append("shutdown")

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> Any:
        store.set(f"seen {group_rank}", "yes")
        return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)


def node(store: Any, size: int, told: dict[int, Any], role: str, max_restarts: int) -> None:
    spec = WorkerSpec(
        role, 2, Counting(store, size), entrypoint=print, max_restarts=max_restarts, monitor_interval=0.01
    )
    agent = Threads(spec)
    result = agent.run()
    group = agent.get_worker_group()
    told[group.group_rank] = {
        "state": result.state.value,
        "failed": result.is_failed(),
        "values": sorted(result.return_values.items()),
        "failures": sorted(result.failures),
        "starts": agent.starts,
        "first": agent.calls[0],
        "last": agent.calls[-1],
        "group": [group.group_world_size, group.spec.role, group.state.value],
    }


def main() -> None:
    told: dict[int, Any] = {}
    node(HashStore(), 1, told, "trainer", max_restarts=int(sys.argv[1]))
    print(json.dumps(told, sort_keys=True))


main()
