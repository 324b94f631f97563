"""Events, metrics, samplers and store helpers: the same calls to torch's and to ours, with the same results."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rallypoint.agent.events import TorchEvents, put_run_result, put_worker_state
from rallypoint.data import CyclingIterator, ElasticDistributedSampler, permutation
from rallypoint.observe.telemetry import agent_events, metrics
from rallypoint.observe.telemetry.agent_events import Event
from rallypoint.store.collectives import barrier, get_all, store_timeout, synchronize
from tests.conformance.record import From, Record
from tests.conformance.store_pairs import client, serving, torch_stores
from tests.processes import completed

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", name="torchs")
def _torchs() -> Any:
    """torch.distributed.elastic with the modules that are compared."""
    for name in ("events", "metrics.api", "utils.data", "utils.store"):
        import_module(f"torch.distributed.elastic.{name}")
    return import_module("torch.distributed.elastic")


# Events


def make_events(of: Any) -> list[Any]:
    metadata = {"a": 1, "b": None, "c": 1.5, "d": True, "e": "é\n%s"}
    return [
        of.Event("n", of.EventSource.AGENT),
        of.Event("n", of.EventSource.WORKER, 7, metadata),
        of.RdzvEvent("n", "id", "m", "h", 3, of.NodeState.RUNNING),
        of.RdzvEvent("n", "id", "m", "h", 3, of.NodeState.FAILED, "h:1", 4, 5, "trace\n"),
    ]


def test_lines_of_events_are_the_same_and_each_reads_the_others(torchs: Any) -> None:
    for ours, theirs in zip(make_events(agent_events), make_events(torchs.events), strict=True):
        assert ours.serialize() == theirs.serialize()
        assert str(ours) == str(theirs)
        assert type(ours).deserialize(theirs.serialize()) == ours
        assert type(theirs).deserialize(ours.serialize()) == theirs


RECORDING = """
import sys
{imports}
record(Event("a", EventSource.AGENT, metadata=dict(x=1)), "console")
record(Event("b", EventSource.WORKER), "null")
record(Event("c", EventSource.WORKER), "console")
handlers["dynamic_rendezvous"] = handlers["console"]
def somebody():
    construct_and_record_rdzv_event("id", "m", NodeState.RUNNING, hostname="h", pid=3, rank=1)
    try:
        raise ValueError("boom")
    except ValueError:
        construct_and_record_rdzv_event("id", "m", NodeState.FAILED, name="x", hostname="h", pid=3)
somebody()
"""
IMPORTS = {
    "torch": "from torch.distributed.elastic.events import *\n"
    "from torch.distributed.elastic.events import Event, EventSource, NodeState, record, "
    "construct_and_record_rdzv_event\nfrom torch.distributed.elastic.events.handlers import _log_handlers as handlers",
    "ours": "from rallypoint.observe.telemetry.agent_events import Event, EventSource, NodeState\n"
    "from rallypoint.observe.telemetry.handlers import record, construct_and_record_rdzv_event\n"
    "from rallypoint.observe.telemetry.handlers import log_handlers as handlers",
}


@pytest.mark.parametrize("level", [None, "WARNING"])
def test_what_the_console_shows(tmp_path: Path, record: Record, level: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "LOGLEVEL"}
    if level is not None:
        environ["LOGLEVEL"] = level

    def shown(kind: str) -> str:
        script = tmp_path / kind / "script.py"
        script.parent.mkdir()
        script.write_text(RECORDING.replace("{imports}", IMPORTS[kind]))
        done = completed([sys.executable, "-W", "ignore", str(script)], check=True, env=environ)
        lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
        assert done.stdout == ""
        return re.sub(r'File \\"[^"]*\\", line \d+', "FILE", json.dumps(lines))

    question = [RECORDING, IMPORTS["torch"], level]
    ours = shown("ours")
    assert ours == record.answer("telemetry", f"console {level}", question, lambda: shown("torch"), From.PYTHON)
    assert ("boom" in ours) == (level != "WARNING")


# The events and metrics of a run

RUN = """
import sys
import warnings
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import torch.distributed.elastic.metrics as metrics
class Shown(metrics.MetricHandler):
    def emit(self, data):
        print("METRIC", data.group_name, data.name, data.value, flush=True)
if __name__ == "__main__":
    metrics.configure(Shown())
    config = LaunchConfig(1, 1, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1,
                          event_log_handler="console", role="trainer")
    try:
        elastic_launch(config, "/bin/sh")("-c", sys.argv[1])
    except Exception as error:
        print("RAISED", type(error).__name__)
"""


class Worker(NamedTuple):
    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    id: object


class Handler(NamedTuple):
    """A rendezvous with this name and backend."""

    def get_run_id(self) -> str:
        return "job"

    def get_backend(self) -> str:
        return "c10d"


class Spec(NamedTuple):
    role: str = "trainer"
    rdzv_handler: Handler = Handler()

    def get_entrypoint_name(self) -> str:
        return "/bin/sh"


class Group(NamedTuple):
    group_rank: int | None
    group_world_size: int | None
    workers: tuple[Worker, ...]
    restarts: int = 0
    spec: Spec = Spec()


class Failure(NamedTuple):
    exitcode: int
    pid: int
    error_file_data: dict[str, object]


BEFORE = Group(None, None, ())


@pytest.mark.parametrize(
    ("script", "restarts", "failed"),
    [("exit $((1 - TORCHELASTIC_RESTART_COUNT))", 1, False), ("exit 3", 1, True)],
)
def test_a_run_is_told_and_measured_alike(script: str, restarts: int, failed: bool) -> None:
    """Real torch runs; what it tells is told again by ours from the same facts, and so are its numbers."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, script]
    done = completed(command, check=True)
    check_events(done.stderr, restarts, failed)
    check_numbers(done.stdout, 1 - restarts, failed)
    ours = [sys.executable, "-c", RUN.replace("torch.distributed", "rallypoint.compat"), script]
    again = completed(ours, check=True)
    assert profiled(again.stdout) == profiled(done.stdout)


def check_events(written: str, restarts: int, failed: bool) -> None:
    """What torch has written on standard error is what ours tells, but for durations."""
    theirs = [Event.deserialize(line) for line in written.splitlines() if line.startswith('{"name"')]
    pids = [each.metadata["worker_id"] for each in theirs if each.metadata["state"] == "START"][-2:]
    group = Group(0, 1, tuple(Worker(rank, rank, rank, 2, pids[rank]) for rank in range(2)))
    data: dict[str, object] = {"message": "<NONE>"}
    data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
    told = {str(each.metadata["raw_error"]) for each in theirs if each.metadata["raw_error"]}
    failures = {
        each.metadata["global_rank"]: json.loads(str(each.metadata["metadata"]))
        for each in theirs
        if each.metadata["state"] == "FAILED"
    }
    assert not failed or json.dumps(data) in told

    def of(group: Any) -> TorchEvents:
        return TorchEvents(group)

    steps = ("RENDEZVOUS", "ASSIGN_WORKER_RANKS")
    ours = [of(BEFORE).agent_event(state, duration_ms=1.0) for state in steps]
    for attempt in range(restarts + 1):
        told_of = of(group._replace(restarts=attempt))
        ours += [told_of.agent_event(state, duration_ms=1.0) for state in steps if attempt]
        ours += told_of.workers_started()
    ended: dict[int, Any] = {}
    for worker in group.workers if failed else ():
        more = failures[worker.global_rank]
        signalled = more["exit_code"][0] < 0
        error: dict[str, object] = {"message": "<NONE>"} if signalled else data
        ended[worker.global_rank] = Failure(more["exit_code"][0], more["worker_pid"][0], error)
    last = of(group._replace(restarts=restarts))
    ours += last.workers_ended("FAILED" if failed else "SUCCEEDED", ended)
    ours.append(last.agent_event("SUCCEEDED"))
    assert list(map(comparable, ours)) == list(map(comparable, theirs))
    assert {each.timestamp for each in theirs} == {0}
    assert all(each.timestamp > 0 for each in ours)


def comparable(event: Event) -> tuple[object, ...]:
    """An event without what differs from run to run, and its time, which torch leaves at 0."""
    metadata = dict(event.metadata)
    duration = metadata.pop("duration_ms")
    metadata["total_run_time"] = type(metadata["total_run_time"]).__name__
    metadata["hostname"] = bool(metadata["hostname"])
    if metadata["state"] == "START":
        metadata["worker_id"] = type(metadata["worker_id"]).__name__
    return event.name, event.source.value, list(metadata.items()), type(duration)


def check_numbers(printed: str, remaining: int, failed: bool) -> None:
    """The metrics of the run that torch has printed end with those that ours puts."""
    theirs = [line.split()[1:] for line in printed.splitlines() if line.startswith("METRIC")]
    kept: list[list[str]] = []

    class Kept(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            kept.append([str(metric_data.group_name), metric_data.name, str(metric_data.value)])

    metrics.configure(Kept())
    try:
        put_worker_state("trainer", "FAILED" if failed else "SUCCEEDED", remaining)
        put_run_result("trainer", failed, remaining, 1)
    finally:
        metrics.configure(metrics.NullMetricHandler())
    of_run = [each for each in theirs if each[1].startswith("workers.")]
    assert of_run[-len(kept) :] == kept


def profiled(output: str) -> Counter[str]:
    """How often each method was called, but for the one that is called as often as workers are looked at."""
    lines = [line.split() for line in output.splitlines() if line.startswith("METRIC")]
    names = [name for _, _, name, _ in lines if not name.startswith("workers.") and "_monitor_workers" not in name]
    return Counter(names)


# Metrics


def use_metrics(of: Any) -> list[tuple[object, ...]]:
    """Put metrics in all ways; what came out."""
    seen: list[tuple[object, ...]] = []

    class MemoryHandler(of.MetricHandler):
        def emit(self, metric_data: Any) -> None:
            seen.append((metric_data.group_name, metric_data.name, type(metric_data.value)))

    early = of.getStream("early")
    of.configure(MemoryHandler())

    class Some:
        @of.prof
        def works(self, number: int, more: int = 1) -> int:
            return number + more

        @of.prof(group="g")
        def fails(self) -> None:
            raise KeyError("x")

    @of.prof
    def inner() -> None:
        return

    of.put_metric("a", 1)
    of.put_metric("a", 1.5, "g")
    early.add_value("lost", 1)
    seen.append(("result", Some().works(2, more=5)))
    with pytest.raises(KeyError):
        Some().fails()
    inner()
    with pytest.warns(FutureWarning):
        of.publish_metric("pub", "n", 4)
    with pytest.warns(FutureWarning):
        profiled = of.profile("pg")(inner)
    with warnings.catch_warnings(action="ignore"):  # torch's warns at each call too
        profiled()
    of.configure(of.NullMetricHandler(), "g")
    of.put_metric("silent", 1, "g")
    of.put_metric("loud", 1, "h")
    of.configure(of.NullMetricHandler())
    of.put_metric("over", 1)
    with pytest.raises(TypeError):
        of.MetricHandler()
    return seen


def test_metrics_come_out_the_same(torchs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert use_metrics(metrics) == use_metrics(torchs.metrics.api)
    lines = []
    for of in (metrics, torchs.metrics.api):
        of.ConsoleMetricHandler().emit(of.MetricData(1.5, "g", "n", 2))
        lines.append(capsys.readouterr().out)
        assert type(of.get_elapsed_time_ms(0)) is int
    assert lines[0] == lines[1] == "[1.5][g]: n=2\n"


# Data


@pytest.mark.parametrize("seed", [0, 1, 5, 2**31, 2**32 - 1, 2**32 + 7, -1])
@pytest.mark.parametrize("n", [0, 1, 2, 10, 1000, 50_000])
def test_permutations_are_torchs(n: int, seed: int) -> None:
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed)
    theirs = torch.randperm(n, generator=generator).tolist()
    assert permutation(n, seed) == theirs
    with pytest.MonkeyPatch.context() as monkeypatch:  # as in a process that has no torch
        monkeypatch.delitem(sys.modules, "torch")
        assert permutation(n, seed) == theirs


@pytest.mark.parametrize(("size", "workers", "start"), [(10, 3, 0), (10, 3, 4), (10, 1, 0), (7, 2, 5), (3, 4, 0)])
@pytest.mark.parametrize("epoch", [0, 1, 12])
def test_samplers_give_the_same_indices(torchs: Any, size: int, workers: int, start: int, epoch: int) -> None:
    for rank in range(workers):
        made = [
            kind(range(size), workers, rank, start)
            for kind in (ElasticDistributedSampler, torchs.utils.data.ElasticDistributedSampler)
        ]
        for sampler in made:
            sampler.set_epoch(epoch)
        ours, theirs = made
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)
        assert {name: value for name, value in vars(ours).items() if name != "dataset"} == {
            name: value for name, value in vars(theirs).items() if name != "dataset"
        }


@pytest.mark.parametrize(("workers", "rank", "start"), [(2, 5, 0), (2, 0, 3), (2, 0, 4), (2, -1, 0)])
def test_samplers_refuse_in_the_same_words(torchs: Any, workers: int, rank: int, start: int) -> None:
    said = []
    for kind in (ElasticDistributedSampler, torchs.utils.data.ElasticDistributedSampler):
        with pytest.raises(ValueError, match=r"rank|Start") as refused:
            kind(range(3), workers, rank, start)
        said.append(str(refused.value))
    assert said[0] == said[1]


class Derived(ElasticDistributedSampler):
    """A sampler as a user may derive it."""


@pytest.mark.parametrize("kind", [ElasticDistributedSampler, Derived])
def test_where_torch_is_there_a_sampler_is_one_of_torchs(kind: type[ElasticDistributedSampler], torchs: Any) -> None:
    from torch.utils.data import DistributedSampler

    sampler = kind(range(5), 2, rank=1, start_index=1)
    assert isinstance(sampler, DistributedSampler)
    assert isinstance(sampler, kind)
    assert type(sampler) is type(kind(range(3), 1, 0))
    again = pickle.loads(pickle.dumps(sampler))
    assert type(again) is type(sampler)
    assert (list(again), vars(again)) == (list(sampler), vars(sampler))
    assert list(copy.deepcopy(sampler)) == list(sampler)
    sampler.set_epoch(3)
    theirs = torchs.utils.data.ElasticDistributedSampler(range(5), 2, rank=1, start_index=1)
    theirs.set_epoch(3)
    assert list(sampler) == list(theirs)


def test_few_samples_for_many_workers_are_given_out_where_torchs_sampler_fails(torchs: Any) -> None:
    with pytest.raises(AssertionError):
        list(torchs.utils.data.ElasticDistributedSampler(range(10), 3, 0, 9))
    assert list(ElasticDistributedSampler(range(10), 3, 0, 9)) == [9]


@pytest.mark.parametrize(("epochs", "start"), [(3, 0), (3, 1), (0, 0), (3, 3)])
def test_cycling_gives_the_same(torchs: Any, epochs: int, start: int) -> None:
    made: list[tuple[list[int], list[int]]] = []
    for kind in (CyclingIterator, torchs.utils.data.CyclingIterator):
        begun: list[int] = []

        def items(epoch: int, begun: list[int] = begun) -> Iterator[int]:
            begun.append(epoch)
            return iter([] if epoch == 1 else [epoch, epoch])

        made.append((list(kind(epochs, items, start)), begun))
    assert made[0] == made[1]


# Stores

Helper = Callable[..., Any]


def four_together(store_of: Callable[[], Any], both: Callable[[int], Helper], work: Callable[..., Any]) -> list[Any]:
    """Run the same work on four ranks, of which each calls the helper that `both` gives it."""
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(work, both(rank), store_of(), rank) for rank in range(4)]
        return [future.result() for future in done]


@pytest.mark.parametrize(("kind", "server"), [("torch", "ours"), ("ours", "torch")])
def test_torchs_helpers_and_ours_meet_in_one_store(torchs: Any, kind: str, server: str) -> None:
    """Ranks 0 and 1 call torch's helper and ranks 2 and 3 ours, over stores of either kind."""
    theirs = torchs.utils.store

    def mixed(their: Helper, our: Helper) -> Callable[[int], Helper]:
        return lambda rank: their if rank < 2 else our

    with serving(server) as port:
        given = [f"d{rank}".encode() for rank in range(4)]

        def store() -> Any:
            return client(kind, port)

        found = four_together(
            store,
            mixed(theirs.synchronize, synchronize),
            lambda call, store, rank: call(store, given[rank], rank, 4, "s"),
        )
        assert [list(map(bytes, each)) for each in found] == [given] * 4
        found = four_together(
            store, mixed(theirs.get_all, get_all), lambda call, store, rank: call(store, rank, "s", 4)
        )
        assert [list(map(bytes, each)) for each in found] == [given] * 4
        four_together(store, mixed(theirs.barrier, barrier), lambda call, store, rank: call(store, 4, "b", 60, rank))


def test_the_keys_and_the_missing_are_the_same(torchs: Any) -> None:
    said, keys = [], []
    for call in (barrier, torchs.utils.store.barrier):
        store = torch_stores().HashStore()
        with pytest.raises(RuntimeError, match="missing_ranks") as refused:
            call(store, 3, "b", 0.1, 0, lambda rank: f"host{rank}", 0.1)
        said.append(re.sub(r"\[(\w+), (\w+)\]", lambda found: str(sorted(found.groups())), str(refused.value)))
        keys.append(sorted((key, bytes(store.get(key))) for key in store.list_keys()))
        assert type(refused.value) is torch_stores().DistStoreError
    assert said[0] == said[1]
    assert keys[0] == keys[1]


def test_torchs_store_keeps_its_timeout_with_ours(torchs: Any) -> None:
    store = torch_stores().HashStore()
    before = store.timeout
    with store_timeout(store, 3), torchs.utils.store.store_timeout(store, 4):
        assert store.timeout.total_seconds() == 4
    assert store.timeout == before
    with pytest.raises(RuntimeError):
        synchronize(store, b"x", 0, 2, "k", 0.1)
    assert store.timeout == before
