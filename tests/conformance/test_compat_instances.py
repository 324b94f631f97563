"""Attributes of instances of the classes in contract sections 5 and 8: torch's beside ours."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conformance.test_compat import module_of_ours, module_of_torch

pytestmark = pytest.mark.torch

AGENT = "distributed.elastic.agent.server.api"
PROCESSES = "distributed.elastic.multiprocessing.api"
MEETING = "distributed.elastic.rendezvous.api"
DYNAMIC = "distributed.elastic.rendezvous.dynamic_rendezvous"
TIMER = "distributed.elastic.timer"
METRICS = "distributed.elastic.metrics.api"
EVENTS = "distributed.elastic.events"
DATA = "distributed.elastic.utils.data"


class Made(NamedTuple):
    """An instance: an expression over the names of a module."""

    module: str
    expression: str


SPEC = "WorkerSpec('r', 2, None, entrypoint=print, args=('a',), max_restarts=7)"

INSTANCES = [
    Made(AGENT, SPEC),
    Made(AGENT, "WorkerSpec(role='r', local_world_size=1, rdzv_handler=None, entrypoint='/bin/x')"),
    Made(AGENT, "Worker(3)"),
    Made(AGENT, "Worker(3, 5, 6, 7, 8)"),
    Made(AGENT, f"WorkerGroup({SPEC})"),
    Made(AGENT, "RunResult(WorkerState.FAILED)"),
    Made(AGENT, "RunResult(state=WorkerState.SUCCEEDED, return_values={0: 1}, failures={})"),
    *[
        Made(AGENT, f"WorkerState.{name}")
        for name in ["UNKNOWN", "INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED"]
    ],
    Made("distributed.elastic.agent.server.health_check_server", "HealthCheckServer(float, 0, 60)"),
    Made("distributed.launcher.api", "LaunchConfig(1, 2, 3)"),
    Made("distributed.launcher.api", "LaunchConfig(1, 1, 1, rdzv_timeout=5, rdzv_configs={'a': 1}, run_id='r')"),
    Made("distributed.launcher.api", "elastic_launch(LaunchConfig(1, 1, 1), print)"),
    Made(PROCESSES, "RunProcsResult()"),
    Made(PROCESSES, "SignalException('m', 15)"),
    *[Made(PROCESSES, f"Std.{name}") for name in ["NONE", "OUT", "ERR", "ALL"]],
    Made(PROCESSES, "Std.from_str('0:1,1:3')"),
    Made(PROCESSES, "LogsDest()"),
    Made(PROCESSES, "DefaultLogsSpecs()"),
    Made(PROCESSES, "to_map(Std.OUT, 2)"),
    Made("distributed.elastic.multiprocessing.errors", "ProcessFailure(1, 22, -9, '')"),
    Made("distributed.elastic.multiprocessing.errors", "ProcessFailure(1, 22, 3, '/nowhere')"),
    Made(
        "distributed.elastic.multiprocessing.errors",
        "ChildFailedError('n', {1: ProcessFailure(0, 2, 3, ''), 0: ProcessFailure(1, 3, 4, '')})",
    ),
    Made("distributed.elastic.multiprocessing.errors", "ErrorHandler()"),
    Made(MEETING, "RendezvousInfo(None, 1, 2, None)"),
    Made(MEETING, "RendezvousStoreInfo('h', 1)"),
    Made(MEETING, "RendezvousParameters('b', 'h:1', 'r', 1, 2, 'l', a='1', b='yes', c=None)"),
    Made(MEETING, "[RendezvousParameters('b', 'h:1', 'r', 1, 2, a='7').get_as_int(key, 3) for key in 'ab']"),
    Made(MEETING, "[RendezvousParameters('b', 'h:1', 'r', 1, 2, a='yes').get_as_bool(key, True) for key in 'ab']"),
    Made(MEETING, "RendezvousHandlerRegistry()"),
    Made(DYNAMIC, "RendezvousTimeout()"),
    Made(DYNAMIC, "RendezvousSettings('r', 1, 2, None, timedelta(1), 3)"),
    Made(TIMER, "TimerRequest(1, 's', 2.5)"),
    Made(TIMER, "FileTimerRequest(1, 's', 2.5)"),
    Made(TIMER, "FileTimerRequest(worker_pid=1, scope_id='s', expiration_time=-1, signal=9)"),
    Made(TIMER, "FileTimerClient('/nowhere')"),
    Made(TIMER, "LocalTimerClient(None)"),
    Made(METRICS, "MetricData(1.5, 'g', 'n', 2)"),
    Made(METRICS, "MetricsConfig()"),
    Made(METRICS, "MetricsConfig({'a': 'b'})"),
    Made(METRICS, "getStream('g')"),
    Made(EVENTS, "Event('n', EventSource.AGENT)"),
    Made(EVENTS, "RdzvEvent('n', 'r', 'm', 'h', 1, NodeState.RUNNING)"),
    *[Made(EVENTS, f"EventSource.{name}") for name in ["AGENT", "WORKER"]],
    *[Made(EVENTS, f"NodeState.{name}") for name in ["INIT", "RUNNING", "SUCCEEDED", "FAILED"]],
    Made("distributed.elastic.utils", "macros()"),
    Made("distributed.elastic.utils", "macros.substitute(['a', '${local_rank}'], '3')"),
    Made(DATA, "CyclingIterator(2, lambda epoch: iter([epoch]))"),
    Made(DATA, "ElasticDistributedSampler(range(5), 2, 1, 1)"),
    Made("distributed.elastic.rendezvous.utils", "parse_rendezvous_endpoint('h:7', 3)"),
    Made("distributed.elastic.rendezvous.utils", "parse_rendezvous_endpoint('', 3)"),
    Made("numa.binding", "NumaOptions(AffinityMode.NODE)"),
    Made("numa.binding", "list(AffinityMode)"),
]

DIFFERENT = {
    "DefaultLogsSpecs.root_log_dir is None": "the folder is made with the first worker's, not with the object",
    "ChildFailedError.args is ['n']": "the report is written when it is asked for",
}
"""What is not there or is another value, by what is said of it, and why."""

SIMPLE = (bool, int, float, str, type(None))


def made(module: Any, expression: str) -> Any:
    return eval(expression, names_in(module, expression))


def names_in(module: Any, expression: str) -> dict[str, Any]:
    """The names of an expression that a module has."""
    return {name: getattr(module, name) for name in re.findall(r"\b[A-Za-z]\w+", expression) if hasattr(module, name)}


def value(thing: object) -> object:
    """What can be compared of a value: plain ones as they are, enums by name, others not at all."""
    if isinstance(thing, Enum):
        return f"{type(thing).__name__}.{thing.name}"
    if isinstance(thing, SIMPLE):
        return thing
    if isinstance(thing, (list, tuple)):
        return [value(each) for each in thing]
    if isinstance(thing, dict):
        return {str(value(key)): value(each) for key, each in thing.items()}
    return None


def shown(thing: Any) -> dict[str, object]:
    """The public attributes of an instance, with the values that can be compared."""
    names = [name for name in dir(thing) if not name.startswith("_")]
    plain = {name: getattr(thing, name) for name in names}
    return {name: value(each) for name, each in plain.items() if not callable(each) or isinstance(each, Enum)} | {
        f"{name}()": None for name, each in plain.items() if callable(each) and not isinstance(each, Enum)
    }


SHOWN_OTHERWISE = {
    "WorkerSpec": "it has fields beyond torch's",
    "RunResult": "it has fields beyond torch's",
    "LaunchConfig": "it has fields beyond torch's",
    "ProcessFailure": "it has fields beyond torch's, and reads its error file when asked",
    "ChildFailedError": "it says what torch's refers to a manual for",
    "DefaultLogsSpecs": "the folder is made with the first worker's, not with the object",
    "TimerRequest": "torch's shows its address",
    "FileTimerRequest": "torch's shows its address",
}
"""Classes whose text is not torch's, and why."""


def text_of(thing: object) -> list[str]:
    """Its texts; none of those that name a place in memory."""
    return [text for text in (str(thing), repr(thing), f"{thing}") if " at 0x" not in text]


def behaves(thing: Any) -> list[object]:
    """Whether it can be a key, is equal to a copy of itself, and is true."""
    try:
        equal = thing == copy.copy(thing)
    except TypeError:  # exceptions, mostly
        equal = None
    return [thing.__hash__ is not None, equal, bool(thing)]


@pytest.mark.parametrize("case", INSTANCES, ids=lambda case: case.expression)
def test_an_instance_shows_itself_and_compares_as_torchs_does(case: Made) -> None:
    theirs, ours = (made(of(case.module), case.expression) for of in (module_of_torch, module_of_ours))
    if type(theirs).__name__ not in SHOWN_OTHERWISE and text_of(theirs):
        assert text_of(ours) == text_of(theirs)
    if type(theirs).__name__ not in COMPARED_OTHERWISE:
        assert behaves(ours) == behaves(theirs)


COMPARED_OTHERWISE = dict.fromkeys(("RendezvousStoreInfo", "LogsDest"), "it is frozen, and may have a hash")
"""Classes whose instances compare otherwise, and why."""


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some of torch's make a temporary folder as soon as they are made themselves, or leave something to the next."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    errors = module_of_torch("distributed.elastic.multiprocessing.errors")
    monkeypatch.setattr(errors, "_EMPTY_ERROR_DATA", {"message": "<NONE>"})  # torch's failures write into it


@functools.cache
def differences(case: Made) -> tuple[str, ...]:
    theirs = made(module_of_torch(case.module), case.expression)
    ours = made(module_of_ours(case.module), case.expression)
    if value(theirs) is not None:
        return () if value(ours) == value(theirs) else (f"{case.expression} is {value(ours)}, not {value(theirs)}",)
    expected, found = shown(theirs), shown(ours)
    name = case.expression.partition("(")[0]
    told = [f"{name} has no {each}" for each in expected if each not in found]
    told += [
        f"{name}.{each} is {found[each]!r}"
        for each, had in expected.items()
        if each in found and had is not None and had != found[each]
    ]
    return tuple(told)


@pytest.mark.parametrize("case", INSTANCES, ids=lambda case: case.expression)
def test_an_instance_has_what_torchs_has(case: Made) -> None:
    assert [text for text in differences(case) if text not in DIFFERENT] == []


def test_each_listed_difference_is_one() -> None:
    assert set(DIFFERENT) <= {text for case in INSTANCES for text in differences(case)}
