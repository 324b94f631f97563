"""Agents of a third party with a loop of their own in place of torch's: `own_loop.py <program>`."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


class Loop:
    """In place of torch's: the same methods, called by nobody else; what happened is in `history`."""

    def _invoke_run(self: Any, role: str = "default") -> RunResult:
        self.history: list[Any] = []
        group, spec = self._worker_group, self._worker_group.spec
        self._initialize_workers(group)
        self.note("started")
        while True:
            time.sleep(spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                self._exit_barrier()
                self.note("done")
                return result
            if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                self.note("failed")
                if self._remaining_restarts == 0:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return result
                self._remaining_restarts -= 1
                self._restart_workers(group)
                self.note("started")
            elif spec.rdzv_handler.num_nodes_waiting() > 0:
                self.note("new nodes")
                self._restart_workers(group)
                self.note("started")

    def note(self: Any, what: str) -> None:
        group = self._worker_group
        ranks = [[each.local_rank, each.global_rank, each.role_rank, each.world_size] for each in group.workers]
        self.history.append([what, group.state.value, group.group_rank, group.group_world_size, ranks])


class ByHand(Loop):
    """The same, and it takes the steps of a start one by one."""

    def _initialize_workers(self: Any, worker_group: WorkerGroup) -> None:
        self._rendezvous(worker_group)
        for local_rank, worker_id in self._start_workers(worker_group).items():
            worker_group.workers[local_rank].id = worker_id
        worker_group.state = WorkerState.HEALTHY


class ByItself(ByHand):
    """The same, and it meets the others by itself."""

    def _rendezvous(self: Any, worker_group: WorkerGroup) -> None:
        info = worker_group.spec.rdzv_handler.next_rendezvous()
        worker_group.store = info.store
        worker_group.group_rank, worker_group.group_world_size = info.rank, info.world_size
        where = info.bootstrap_store_info
        worker_group.master_addr, worker_group.master_port = where.master_addr, where.master_port
        worker_group.workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, worker_group.spec)


class Threads(SimpleElasticAgent):
    """Each worker is a thread, which ends by itself; the first start of odd ranks fails if `fails`."""

    def __init__(self, spec: WorkerSpec, fails: int) -> None:
        super().__init__(spec, exit_barrier_timeout=30)
        self.fails, self.starts = fails, 0
        self.values: dict[int, Any] = {}
        self.failures: dict[int, ProcessFailure] = {}
        self.threads: list[threading.Thread] = []
        self.ends: list[str] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.values, self.failures = {}, {}
        self.threads = [threading.Thread(target=self._work, args=(each, self.starts)) for each in worker_group.workers]
        self.starts += 1
        for thread in self.threads:
            thread.start()
        return {each.local_rank: each.local_rank for each in worker_group.workers}

    def _work(self, worker: Any, start: int) -> None:
        if start < self.fails and worker.local_rank == 1:
            self.failures[worker.global_rank] = ProcessFailure(worker.local_rank, 1, 1, "")
        self.values[worker.global_rank] = [worker.global_rank, worker.world_size, start]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.ends.append("stop")
        for thread in self.threads:
            thread.join()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(thread.is_alive() for thread in self.threads):
            return RunResult(state=WorkerState.HEALTHY)
        if self.failures:
            return RunResult(state=WorkerState.FAILED, failures=self.failures)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=self.values)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.ends.append("shutdown")


class ThreadsInALoop(Loop, Threads):
    pass


class ThreadsByHand(ByHand, Threads):
    pass


class ThreadsByItself(ByItself, Threads):
    pass


class ProcessesInALoop(Loop, LocalElasticAgent):
    pass


class Counting(RendezvousHandler):
    """Of a third party: nodes are ranked in the order in which they come, two rounds at most are needed."""

    def __init__(self, store: Any, size: int) -> None:
        self.store, self.size, self.round = store, size, -1
        self.askers: set[int] = set()

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
        self.askers.add(threading.get_ident())
        assert len(self.askers) == 1, "nobody asks but the agent's own loop"
        return 0

    def get_run_id(self) -> str:
        return "counted"

    def shutdown(self) -> bool:
        return True


def handler(kind: str, nodes: str = "1", endpoint: str = "localhost:0") -> Any:
    if kind == "counting":
        return Counting(HashStore(), 1)
    low, _, high = nodes.partition(":")
    params = RendezvousParameters(kind, endpoint, "job", int(low), int(high or low), last_call_timeout=1)
    return get_rendezvous_handler(params)


def of_threads(agent_class: Any, rendezvous: str, fails: int, max_restarts: int) -> Any:
    spec = WorkerSpec("trainer", 2, handler(rendezvous), entrypoint=print, max_restarts=max_restarts)
    agent = agent_class(spec, fails)
    result = agent.run()
    told = [result.state.value, sorted(result.return_values.items()), sorted(result.failures)]
    return [told, agent.history, agent.starts, agent.ends[:1], agent.ends[-1], agent.get_worker_group().state.value]


WORKER = """
import os, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
start, rank, size = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
with open(f"{sys.argv[1]}/{start}-{rank}-of-{size}", "w") as file:
    file.write(" ".join(os.environ[name] for name in names))
fails = start < int(sys.argv[2])
while size < int(sys.argv[3]) or (fails and rank != 0):
    time.sleep(0.01)
sys.exit(3 if fails else 0)
"""


def of_processes(meeting: Any, folder: str, fails: int, max_restarts: int, size: int = 2) -> Any:
    """`size` is the number of workers for which those of a smaller round wait until they are stopped."""
    spec = WorkerSpec(
        "trainer",
        2,
        meeting,
        entrypoint=sys.executable,
        args=("-c", WORKER, folder, str(fails), str(size)),
        max_restarts=max_restarts,
    )
    agent = ProcessesInALoop(spec, DefaultLogsSpecs(log_dir=f"{folder}/logs"), start_method="spawn")
    result = agent.run()
    codes = {each.exitcode for each in result.failures.values() if each.exitcode > 0}
    return [result.state.value, sorted(codes), [each[:4] for each in agent.history]]


def written(folder: str, restarts: int) -> dict[str, str]:
    """What the workers of a start have said. In an earlier one some may have been stopped before they could."""
    said = {}
    for name in os.listdir(folder):
        if name.startswith(f"{restarts}-"):
            with open(os.path.join(folder, name)) as file:
                said[name] = file.read()
    return said


def alone(rendezvous: str) -> list[Any]:
    told: list[Any] = []
    for fails in range(3):
        kinds = (ThreadsInALoop, ThreadsByHand, ThreadsByItself)
        told += [of_threads(kind, rendezvous, fails, max_restarts=1) for kind in kinds]
        with tempfile.TemporaryDirectory() as folder:
            told.append(of_processes(handler(rendezvous), folder, fails, max_restarts=1))
            told.append(written(folder, fails))
    return told


def node(folder: str, port: str, nodes: str, size: str, fails: str, max_restarts: str) -> list[Any]:
    meeting = handler("c10d", nodes, f"localhost:{port}")
    try:
        return [of_processes(meeting, folder, int(fails), int(max_restarts), int(size))]
    except RendezvousError as error:
        return [type(error).__name__, str(error)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def two_nodes(nodes: str, size: str, fails: str, max_restarts: str) -> list[Any]:
    """Two agents; the second one comes when the first round of one node runs, or at once if that takes two."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "node", folder, str(free_port())]
        agents = []
        for _ in range(2):
            flags = [nodes, size, fails, max_restarts]
            agents.append(subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True))
            while nodes == "1:2" and not os.path.exists(f"{folder}/0-1-of-2"):
                time.sleep(0.01)
        told = [json.loads(agent.communicate()[0].splitlines()[-1]) for agent in agents]
        return [sorted(told, key=str), written(folder, int(fails))]


class Signalled(ProcessesInALoop):
    """Is sent a signal when its workers run."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        folder = worker_group.spec.args[2]
        while len(written(folder, 0)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        return RunResult(state=WorkerState.HEALTHY)


def signalled() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        args = ("-c", WORKER, folder, "0", "4")
        spec = WorkerSpec("trainer", 2, handler("c10d"), entrypoint=sys.executable, args=args)
        agent = Signalled(spec, DefaultLogsSpecs(log_dir=f"{folder}/logs"), start_method="spawn")
        try:
            agent.run()
        except SignalException as ending:
            pids = [each.id for each in agent.get_worker_group().workers]
            return [ending.sigval, len(pids), [pid for pid in pids if os.path.exists(f"/proc/{pid}")]]
        return ["it was not heard"]


PROGRAMS: dict[str, Callable[..., list[Any]]] = {
    "counting": lambda *_: alone("counting"),
    "c10d": lambda *_: alone("c10d"),
    "node": node,
    "signalled": signalled,
    "two": lambda *_: two_nodes("2", "4", "0", "0"),
    "grows": lambda *_: two_nodes("1:2", "4", "0", "0"),
    "breaks": lambda *_: two_nodes("2", "4", "1", "1"),
    "fails": lambda *_: two_nodes("2", "4", "1", "0"),
}


def main() -> None:
    print(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:]), sort_keys=True))


main()
