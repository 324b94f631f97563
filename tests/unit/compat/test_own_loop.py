"""An agent with a loop of its own, in place of ours: the same methods, called from there."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.agent.spec import RunResult, WorkerSpec, WorkerState
from rallypoint.base.endpoint import host_name
from rallypoint.compat.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from rallypoint.logs.specs import DefaultLogsSpecs
from rallypoint.protocol.errors import RendezvousClosedError, RendezvousTimeoutError
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.registry import get_rendezvous_handler
from rallypoint.store.hashstore import HashStore
from tests.ports import free_port
from tests.unit.agent.third_party import CountingHandler, outcome

pytestmark = pytest.mark.process

Loop = Callable[["Looping"], RunResult]


class Looping(LocalElasticAgent):
    """Runs `loop` in place of ours."""

    def __init__(self, loop: Loop, handler: RendezvousHandler, folder: Path, *command: str, restarts: int = 0) -> None:
        program, *args = command or (sys.executable, "-c", "")
        spec = WorkerSpec(
            "default", 2, handler, entrypoint=program, args=tuple(args), max_restarts=restarts, monitor_interval=0.01
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "logs")), exit_barrier_timeout=30)
        self.loop = loop

    def _invoke_run(self, role: str = "default") -> RunResult:
        return self.loop(self)

    def watch(self) -> RunResult:
        """Look at the workers until they have ended."""
        while True:
            result = self._monitor_workers(self._worker_group)
            self._worker_group.state = result.state
            if not WorkerState.is_running(result.state):
                return result
            time.sleep(self._worker_group.spec.monitor_interval)

    def begin(self) -> None:
        self._initialize_workers(self._worker_group)

    def pids(self) -> list[int]:
        return [worker.id for worker in self._worker_group.workers]


def meeting(nodes: int = 1, port: int = 0, **options: object) -> RendezvousHandler:
    return get_rendezvous_handler(
        RendezvousParameters("c10d", f"localhost:{port}", "job", nodes, nodes, None, **options)
    )


def counted() -> RendezvousHandler:
    return CountingHandler(HashStore(), "job", 1, address="127.0.0.1")


SLEEPS = (sys.executable, "-c", "import time; time.sleep(100)")


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("handler", [meeting, counted])
def test_whatever_the_loop_raises_no_worker_is_left(handler: Callable[[], RendezvousHandler], tmp_path: Path) -> None:
    pids: list[int] = []

    def loop(agent: Looping) -> RunResult:
        agent.begin()
        pids.extend(agent.pids())
        assert agent._monitor_workers(agent.get_worker_group()).state is WorkerState.HEALTHY
        raise ZeroDivisionError("in the loop")

    with pytest.raises(ZeroDivisionError, match="in the loop"):
        Looping(loop, handler(), tmp_path, *SLEEPS).run()
    assert len(pids) == 2
    assert gone(pids)


def test_timers_of_workers_are_enforced_at_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "timer"))
    text = (
        "import os, signal, sys, rallypoint.watchdog.client as timer\n"
        "timer.configure(timer.FileTimerClient(os.environ['TORCHELASTIC_TIMER_FILE']))\n"
        "with timer.expires(after=0.2, scope='the step'): signal.pause()\n"
    )

    def loop(agent: Looping) -> RunResult:
        agent.begin()
        return agent.watch()

    result = outcome(Looping(loop, meeting(), tmp_path, sys.executable, "-c", text))
    assert result.is_failed()
    failure = next(iter(result.failures.values()))
    assert failure.exitcode < 0
    assert re.search(r"its timer 'the step' of 0\.[0-2] s ran out", str(failure.message))
    assert not (tmp_path / "timer").exists()


def test_the_health_check_answers_while_the_loop_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(port))

    def loop(agent: Looping) -> RunResult:
        agent.begin()
        agent._monitor_workers(agent.get_worker_group())
        with urllib.request.urlopen(f"http://localhost:{port}/status", timeout=30) as answer:
            assert b'"role": "default"' in answer.read()
        return RunResult(WorkerState.STOPPED)

    assert outcome(Looping(loop, meeting(), tmp_path, *SLEEPS)).state is WorkerState.STOPPED
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://localhost:{port}/status", timeout=30)


def test_signals_of_the_user_are_back_at_the_end(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def loop(agent: Looping) -> RunResult:
        agent.begin()
        seen.append(signal.getsignal(signal.SIGTERM))
        return agent.watch()

    assert outcome(Looping(loop, meeting(), tmp_path)).state is WorkerState.SUCCEEDED
    assert signal.getsignal(signal.SIGTERM) == before != seen[0]


def run_both(first: Looping, second: Looping) -> list[RunResult | Exception]:
    """Run two agents side by side, the first one in this thread; what each comes to."""
    ends: list[RunResult | Exception] = [RunResult(WorkerState.UNKNOWN)] * 2

    def run(place: int, agent: Looping) -> None:
        try:
            ends[place] = outcome(agent)
        except Exception as error:
            ends[place] = error

    other = threading.Thread(target=run, args=(1, second))
    other.start()
    run(0, first)
    other.join(60)
    assert not other.is_alive()
    return ends


def begin_and_watch(agent: Looping) -> RunResult:
    agent.begin()
    return agent.watch()


def begin_watch_and_meet(agent: Looping) -> RunResult:
    agent.begin()
    result = agent.watch()
    agent._exit_barrier()
    return result


def test_a_loop_that_forgets_the_barrier_lets_the_others_end_well(tmp_path: Path) -> None:
    port = free_port()
    agents = [
        Looping(loop, meeting(2, port), tmp_path / name)
        for name, loop in (("a", begin_and_watch), ("b", begin_watch_and_meet))
    ]
    ends = run_both(*agents)
    assert [end.state for end in ends if isinstance(end, RunResult)] == [WorkerState.SUCCEEDED] * 2, ends


def test_a_failure_without_restarts_is_the_jobs_end_for_all(tmp_path: Path) -> None:
    """The other one learns of it at its next look, and from the error whose workers have failed and how."""
    port = free_port()

    def waits(agent: Looping) -> RunResult:
        agent.begin()
        while agent.get_worker_group().spec.rdzv_handler.num_nodes_waiting() == 0:
            agent._monitor_workers(agent.get_worker_group())
            time.sleep(0.01)
        agent._restart_workers(agent.get_worker_group())
        raise AssertionError("there is no next round")

    fails = Looping(begin_and_watch, meeting(2, port), tmp_path / "a", sys.executable, "-c", "raise SystemExit(7)")
    ends = run_both(fails, Looping(waits, meeting(2, port), tmp_path / "b", *SLEEPS))
    assert isinstance(ends[0], RunResult)
    assert ends[0].is_failed()
    assert isinstance(ends[1], RendezvousClosedError)
    assert "the job has failed: rank" in str(ends[1])


def test_restarts_that_are_counted_down(tmp_path: Path) -> None:
    left: list[int] = []
    starts: list[str] = []

    def loop(agent: Looping) -> RunResult:
        agent.begin()
        while True:
            starts.extend(sorted(path.name for path in (tmp_path / "logs").rglob("attempt_*")))
            left.append(agent._remaining_restarts)
            result = agent.watch()
            if not agent._remaining_restarts:
                return result
            agent._remaining_restarts -= 1
            agent._restart_workers(agent.get_worker_group())

    agent = Looping(loop, meeting(), tmp_path, sys.executable, "-c", "raise SystemExit(7)", restarts=2)
    assert outcome(agent).is_failed()
    assert left == [2, 1, 0]
    assert starts[-1] == "attempt_2"


def test_a_round_that_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(RendezvousTimeoutError, match="1 of 2 nodes"):
        Looping(begin_and_watch, meeting(2, join_timeout=1), tmp_path).run()


def test_who_waits_for_others_says_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.rendezvous.elastic.FIRST_PROGRESS_REQUEST", 0.1)
    with pytest.raises(RendezvousTimeoutError):
        Looping(begin_and_watch, meeting(2, join_timeout=5), tmp_path).run()
    assert "waiting for the rendezvous of job 'job' at" in caplog.text
    told = rf"1 of 2 nodes are in \({re.escape(host_name())}\), 1 is missing; giving up in [1-5] s"
    assert re.search(told, caplog.text)
