"""Agents over a handler that must be polled, as third parties write them; workers are real processes."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.agent.spec import RunResult, Worker, WorkerSpec, WorkerState
from rallypoint.agent.third_party import PollingRendezvousClient
from rallypoint.compat.agent import LocalElasticAgent
from rallypoint.control.membership.state import Drain, Fail, NodeInfo, PreemptJob
from rallypoint.control.protocol.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rallypoint.control.protocol.messages import JobEnded, Notification, Placed
from rallypoint.failures.cause import Cause, Ending
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.store.api import Store
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreTimeoutError
from rallypoint.store.plain import HashStore
from rallypoint.store.server import StoreServer
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from tests.unit.agent.third_party import CountingHandler, RaisingHandler, outcome
from tests.unit.agent.thread_workers import ThreadWorkers

pytestmark = pytest.mark.process

TIMEOUT = 120.0
TELL = """
import os
names = ("RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
print(*(os.environ[name] for name in names))
"""


class NotingAgent(LocalElasticAgent):
    """What a user writes: a subclass that takes part in a step and leaves the rest as it is."""

    def __init__(self, spec: WorkerSpec, folder: Path, exit_barrier_timeout: float = 60) -> None:
        super().__init__(spec, DefaultLogsSpecs(str(folder), redirects=Std.OUT), "spawn", exit_barrier_timeout)
        self.assigned: list[list[int]] = []

    def _assign_worker_ranks(
        self, store: Store | None, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        assert store is not None, "an override gets the round's store"
        store.set(f"noted/{group_rank}", spec.role)
        workers = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        self.assigned.append([worker.global_rank for worker in workers])
        return workers


def agent_over(
    handler: RendezvousHandler,
    folder: Path,
    text: str,
    *,
    role: str = "default",
    workers: int = 1,
    max_restarts: int = 0,
    exit_barrier_timeout: float = 60,
) -> NotingAgent:
    spec = WorkerSpec(
        role,
        workers,
        handler,
        entrypoint=sys.executable,
        args=("-u", "-c", text),
        max_restarts=max_restarts,
        monitor_interval=0.02,
    )
    return NotingAgent(spec, folder, exit_barrier_timeout)


def run_side_by_side(*agents: NotingAgent) -> list[RunResult]:
    """Run agents as if each was on a node of its own."""
    results: dict[int, RunResult] = {}

    def runs(number: int, agent: NotingAgent) -> Callable[[], None]:
        return lambda: results.update({number: outcome(agent)})

    threads = [threading.Thread(target=runs(number, agent)) for number, agent in enumerate(agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    return [results[number] for number in range(len(agents))]


def told(folder: Path) -> list[str]:
    """The first line of each worker of each attempt."""
    return sorted(path.read_text().strip() for path in folder.glob("*/attempt_*/*/stdout.log"))


def test_ranks_are_exchanged_over_the_rounds_store(tmp_path: Path) -> None:
    server = StoreServer("127.0.0.1")
    stores = [TCPStore("127.0.0.1", server.port) for _ in range(2)]
    try:
        handlers = [CountingHandler(store, "job", 2) for store in stores]
        a = agent_over(handlers[0], tmp_path / "a", TELL, role="A")
        b = agent_over(handlers[1], tmp_path / "b", TELL, role="B", workers=2)
        results = run_side_by_side(a, b)
        assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
        lines = [line.split() for line in told(tmp_path / "a") + told(tmp_path / "b")]
        assert sorted(line[0] for line in lines) == ["0", "1", "2"]
        assert [line[1] for line in lines] == ["0", "0", "1"]
        assert [line[2:4] for line in lines] == [["3", "1"], ["3", "2"], ["3", "2"]]
        assert [result.return_values.keys() for result in results] == [
            set(ranks[0]) for ranks in (a.assigned, b.assigned)
        ]
        assert [handler.shut for handler in handlers] == [1, 1]
    finally:
        for store in stores:
            store.close()
        server.close()


def test_the_production_agent_meets_by_such_a_handler_and_starts_again() -> None:
    def fails_once(rank: int, start: int, stopping: threading.Event) -> int:
        if start == 0:
            raise ValueError("once")
        return start

    handler = CountingHandler(HashStore(), "job", 1, address="127.0.0.1")
    workers = ThreadWorkers(fails_once, handler)
    assert outcome(workers).return_values == {0: 1}
    assert workers.calls == ["start", "begin SIGTERM", "start", "begin SIGTERM", "shutdown SIGTERM"]
    assert handler.shut == 1


def test_a_restart_of_one_agent_brings_the_others_along_without_a_restart_of_theirs(tmp_path: Path) -> None:
    store = HashStore()
    # The other one's worker of the first round ends only by being stopped, so it must run before there is a failure.
    fails_once = (
        TELL + f"import sys, time\nwhile not os.path.exists({str(tmp_path / 'b')!r} + '/again'): time.sleep(0.01)\n"
    )
    fails_once += "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(1)"
    waits = TELL + f"import time\nif os.path.exists({str(tmp_path / 'b')!r} + '/again'): raise SystemExit\n"
    waits += f"open({str(tmp_path / 'b')!r} + '/again', 'w').close()\ntime.sleep(600)"
    a = agent_over(CountingHandler(store, "job", 2), tmp_path / "a", fails_once, max_restarts=1)
    b = agent_over(CountingHandler(store, "job", 2), tmp_path / "b", waits, max_restarts=0)
    results = run_side_by_side(a, b)
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert len(a.assigned) == len(b.assigned) == 2
    assert sorted(line.split()[-1] for line in told(tmp_path / "a")) == ["0", "1"]
    assert sorted(line.split()[-1] for line in told(tmp_path / "b")) == ["0", "1"], "one number for all, and a new one"


def test_the_handlers_own_address_is_where_the_workers_store_is(tmp_path: Path) -> None:
    text = "import os\nprint(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    agent = agent_over(CountingHandler(HashStore(), "job", 1, address="10.1.2.3"), tmp_path, text)
    run_side_by_side(agent)
    assert told(tmp_path) == ["10.1.2.3 1234"]


def test_a_barrier_that_fails_does_not_turn_success_into_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    a = agent_over(CountingHandler(store, "job", 2), tmp_path / "a", "", exit_barrier_timeout=0.2)
    b = agent_over(CountingHandler(store, "job", 2), tmp_path / "b", "raise SystemExit(1)")
    first, second = run_side_by_side(a, b)
    assert first.state is WorkerState.SUCCEEDED
    assert second.is_failed()
    assert "did not reach the exit barrier" in caplog.text


@pytest.mark.parametrize(
    "raised",
    [
        RendezvousClosedError("over"),
        RendezvousTimeoutError("too late"),
        RendezvousConnectionError("away"),
        KeyError("x"),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_the_handler_raises_is_what_the_agent_raises(tmp_path: Path, raised: BaseException) -> None:
    handler = RaisingHandler(HashStore(), raised)
    with pytest.raises(type(raised)) as found:
        agent_over(handler, tmp_path, "").run()
    assert found.value is raised
    assert handler.shut == 1


class RaisesWhenAsked(CountingHandler):
    """One that cannot say how many nodes wait."""

    def num_nodes_waiting(self) -> int:
        raise RendezvousClosedError("over")


def test_what_the_handler_raises_while_workers_run_ends_the_agent_too(tmp_path: Path) -> None:
    handler = RaisesWhenAsked(HashStore(), "job", 1)
    with pytest.raises(RendezvousClosedError, match=r"^over$"):
        agent_over(handler, tmp_path, "import time; time.sleep(600)").run()


def test_a_spare_that_the_handler_sends_home_ends_well(tmp_path: Path) -> None:
    handler = RaisingHandler(HashStore(), RendezvousGracefulExitError("not needed"))
    assert agent_over(handler, tmp_path, "").run() is None


def test_an_exchange_that_fails_ends_the_agent(tmp_path: Path) -> None:
    """The others of the round never say what they bring."""
    store = HashStore(timeout=0.2)
    CountingHandler(store, "job", 2)._joined(0, 1)
    with pytest.raises(StoreTimeoutError):
        agent_over(CountingHandler(store, "job", 2), tmp_path, "").run()


def told_by(client: PollingRendezvousClient) -> queue.SimpleQueue[Notification]:
    heard: queue.SimpleQueue[Notification] = queue.SimpleQueue()
    client.listen(heard.put)
    return heard


def preempted_client() -> tuple[PollingRendezvousClient, queue.SimpleQueue[Notification]]:
    """A client that has its place and was asked to preempt the job, and what it says from then on."""
    spec = WorkerSpec("default", 1, CountingHandler(HashStore(), "job", 1, address="127.0.0.1"), entrypoint="true")
    client = PollingRendezvousClient(spec)
    heard = told_by(client)
    client.join(NodeInfo("default", 1, "", 0))
    assert isinstance(heard.get(timeout=TIMEOUT), Placed)
    client.send(PreemptJob(60.0, "received SIGUSR2"))
    return client, heard


def test_a_preemption_ends_this_node_when_its_workers_have_saved() -> None:
    """Nobody else can be told: under such a handler each node has to be sent the signal."""
    client, heard = preempted_client()
    client.send(Drain(0, needs_consent=True))
    ended = heard.get(timeout=TIMEOUT)
    assert isinstance(ended, JobEnded)
    assert ended.verdict.ending is Ending.PREEMPTED
    assert ended.verdict.detail.endswith(" received SIGUSR2")
    assert ended.is_delegate
    client.shutdown()
    assert heard.empty()


def test_a_failure_of_a_preempted_node_restarts_nothing() -> None:
    client, heard = preempted_client()
    client.send(Fail(0, Cause(0, 0, "h", 42, 1, "boom", "", 0.0, ""), 3))
    ended = heard.get(timeout=TIMEOUT)
    assert isinstance(ended, JobEnded)
    assert ended.verdict.ending is Ending.PREEMPTED
    client.shutdown()
