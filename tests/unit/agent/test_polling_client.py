"""Agents with a handler that must be polled, as third parties write them; workers are real processes."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
from tests.unit.agent.test_exchange import side_by_side
from tests.unit.agent.third_party import CountingHandler, RaisingHandler, outcome
from tests.unit.agent.thread_workers import ThreadWorkers

pytestmark = pytest.mark.process

TIMEOUT = 120.0
SHOW = """
import os
names = ("RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
print(*(os.environ[name] for name in names))
"""


class NotingAgent(LocalElasticAgent):
    """A user's subclass, which overrides one step."""

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
    handler: RendezvousHandler, folder: Path, text: str, *, exit_barrier_timeout: float = 60, **more: Any
) -> NotingAgent:
    fields: dict[str, Any] = {"role": "default", "local_world_size": 1, "max_restarts": 0, "monitor_interval": 0.02}
    fields |= {"rdzv_handler": handler, "entrypoint": sys.executable, "args": ("-u", "-c", text)}
    spec = WorkerSpec(**fields | more)
    return NotingAgent(spec, folder, exit_barrier_timeout)


def run_side_by_side(*agents: NotingAgent) -> list[RunResult]:
    """Run agents as if each was on its own node."""
    return side_by_side(len(agents), lambda number: outcome(agents[number]))


def outputs(folder: Path) -> list[str]:
    """The output of each worker of each attempt."""
    return sorted(path.read_text().strip() for path in folder.glob("*/attempt_*/*/stdout.log"))


def test_ranks_are_exchanged_over_the_rounds_store(tmp_path: Path) -> None:
    with StoreServer("127.0.0.1") as server, ExitStack() as stack:
        stores = [stack.enter_context(TCPStore("127.0.0.1", server.port)) for _ in range(2)]
        handlers = [CountingHandler(store, "job", 2) for store in stores]
        a = agent_over(handlers[0], tmp_path / "a", SHOW, role="A")
        b = agent_over(handlers[1], tmp_path / "b", SHOW, role="B", local_world_size=2)
        results = run_side_by_side(a, b)
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    lines = [line.split() for line in outputs(tmp_path / "a") + outputs(tmp_path / "b")]
    assert sorted(line[0] for line in lines) == ["0", "1", "2"]
    assert [line[1:4] for line in lines] == [["0", "3", "1"], ["0", "3", "2"], ["1", "3", "2"]]
    assert [result.return_values.keys() for result in results] == [set(a.assigned[0]), set(b.assigned[0])]
    assert [handler.shut for handler in handlers] == [1, 1]


def test_our_own_agent_restarts_its_workers() -> None:
    def fails_once(rank: int, start: int, stopping: threading.Event) -> int:
        if start == 0:
            raise ValueError("once")
        return start

    handler = CountingHandler(HashStore(), "job", 1, address="127.0.0.1")
    workers = ThreadWorkers(fails_once, handler)
    assert outcome(workers).return_values == {0: 1}
    assert workers.calls == ["start", "begin SIGTERM", "start", "begin SIGTERM", "shutdown SIGTERM"]
    assert handler.shut == 1


def test_a_restart_of_one_agent_uses_no_restart_of_another(tmp_path: Path) -> None:
    store, again = HashStore(), str(tmp_path / "again")
    # The worker of the second agent ends only when it is stopped, so it must run before the first one fails.
    fails_once = SHOW + f"import sys, time\nwhile not os.path.exists({again!r}): time.sleep(0.01)\n"
    fails_once += "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(1)"
    waits = SHOW + f"import time\nif os.path.exists({again!r}): raise SystemExit\n"
    waits += f"open({again!r}, 'w').close()\ntime.sleep(600)"
    a = agent_over(CountingHandler(store, "job", 2), tmp_path / "a", fails_once, max_restarts=1)
    b = agent_over(CountingHandler(store, "job", 2), tmp_path / "b", waits)
    results = run_side_by_side(a, b)
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert len(a.assigned) == len(b.assigned) == 2
    for name in "ab":
        assert sorted(line.split()[-1] for line in outputs(tmp_path / name)) == ["0", "1"], "all have one number"


def test_the_workers_store_has_the_address_of_the_handler(tmp_path: Path) -> None:
    text = "import os\nprint(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    run_side_by_side(agent_over(CountingHandler(HashStore(), "job", 1, address="10.1.2.3"), tmp_path, text))
    assert outputs(tmp_path) == ["10.1.2.3 1234"]


def test_a_failed_exit_barrier_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_agents_raise_the_errors_of_the_handler(tmp_path: Path, raised: BaseException) -> None:
    handler = RaisingHandler(HashStore(), raised)
    with pytest.raises(type(raised)) as found:
        agent_over(handler, tmp_path, "").run()
    assert found.value is raised
    assert handler.shut == 1


def test_an_error_of_the_handler_while_workers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RendezvousClosedError("over")

    handler = CountingHandler(HashStore(), "job", 1)
    monkeypatch.setattr(handler, "num_nodes_waiting", fail)
    with pytest.raises(RendezvousClosedError, match=r"^over$"):
        agent_over(handler, tmp_path, "import time; time.sleep(600)").run()


def test_agents_that_get_no_ranks(tmp_path: Path) -> None:
    handler = RaisingHandler(HashStore(), RendezvousGracefulExitError("not needed"))
    assert agent_over(handler, tmp_path, "").run() is None, "it was a spare"
    store = HashStore(timeout=0.2)
    CountingHandler(store, "job", 2)._joined(0, 1)  # which sends nothing more
    with pytest.raises(StoreTimeoutError):
        agent_over(CountingHandler(store, "job", 2), tmp_path, "").run()


FAILURE = Fail(0, Cause(0, 0, "h", 42, 1, "boom", "", 0.0, ""), 3)


@pytest.mark.parametrize("then", [Drain(0, needs_consent=True), FAILURE], ids=["saved", "failed"])
def test_a_preemption_ends_this_node(then: Drain | Fail) -> None:
    """Such a handler cannot notify other nodes, so each node must receive the signal. A failure restarts nothing."""
    spec = WorkerSpec("default", 1, CountingHandler(HashStore(), "job", 1, address="127.0.0.1"), entrypoint="true")
    client = PollingRendezvousClient(spec)
    received: queue.SimpleQueue[Notification] = queue.SimpleQueue()
    client.listen(received.put)
    client.join(NodeInfo("default", 1, "", 0))
    assert isinstance(received.get(timeout=TIMEOUT), Placed)
    client.send(PreemptJob(60.0, "received SIGUSR2"))
    client.send(then)
    ended = received.get(timeout=TIMEOUT)
    assert isinstance(ended, JobEnded)
    assert ended.verdict.ending is Ending.PREEMPTED
    assert ended.verdict.detail.endswith(" received SIGUSR2")
    assert ended.is_delegate
    client.shutdown()
    assert received.empty()
