"""Module for module, `rallypoint.compat` beside torch: the same names, of the same kinds, called the same way."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import Any

import pytest

from rallypoint.compat.names import MODULES, _home

pytestmark = pytest.mark.torch

_AGENT = "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec WorkerState"
_TIMER_NAMES = "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE"
_PROCESSES = (
    "MultiprocessContext PContext ProcessFailure RunProcsResult SignalException Std LogsDest LogsSpecs "
    "DefaultLogsSpecs SubprocessContext to_map"
)
_RENDEZVOUS = (
    "RendezvousClosedError RendezvousConnectionError RendezvousError RendezvousGracefulExitError RendezvousStateError "
    "RendezvousTimeoutError RendezvousHandler RendezvousHandlerCreator RendezvousHandlerRegistry RendezvousInfo "
    "RendezvousParameters RendezvousStoreInfo rendezvous_handler_registry"
)
_METRICS = (
    "configure ConsoleMetricHandler NullMetricHandler MetricHandler MetricData MetricsConfig getStream prof profile "
    "put_metric publish_metric get_elapsed_time_ms"
)
_EVENTS = "Event EventSource EventMetadataValue NodeState RdzvEvent"
_UTILS = "get_env_variable_or_raise get_socket_with_port macros"

PUBLIC = {
    "distributed.launcher": "LaunchConfig elastic_launch launch_agent",
    "distributed.launcher.api": "LaunchConfig elastic_launch launch_agent",
    "distributed.run": (
        "get_args_parser parse_args parse_min_max_nnodes determine_local_world_size get_rdzv_endpoint get_use_env "
        "config_from_args run_script_path run main"
    ),
    "distributed.launch": "parse_args launch main",
    "distributed.elastic.agent.server": f"{_AGENT} {_TIMER_NAMES}",
    "distributed.elastic.agent.server.api": f"{_AGENT} DEFAULT_ROLE",
    "distributed.elastic.agent.server.local_elastic_agent": (
        f"LocalElasticAgent {_TIMER_NAMES} TORCHELASTIC_HEALTH_CHECK_PORT TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
    ),
    "distributed.elastic.agent.server.health_check_server": "HealthCheckServer create_healthcheck_server",
    "distributed.elastic.multiprocessing": f"start_processes {_PROCESSES}",
    "distributed.elastic.multiprocessing.api": f"{_PROCESSES} get_std_cm",
    "distributed.elastic.multiprocessing.errors": (
        "ProcessFailure ChildFailedError record ErrorHandler get_error_handler"
    ),
    "distributed.elastic.multiprocessing.errors.error_handler": "ErrorHandler",
    "distributed.elastic.multiprocessing.errors.handlers": "get_error_handler",
    "distributed.elastic.rendezvous": _RENDEZVOUS,
    "distributed.elastic.rendezvous.api": _RENDEZVOUS,
    "distributed.elastic.rendezvous.registry": "get_rendezvous_handler",
    "distributed.elastic.rendezvous.dynamic_rendezvous": (
        "RendezvousBackend RendezvousTimeout RendezvousSettings DynamicRendezvousHandler create_handler Token"
    ),
    "distributed.elastic.rendezvous.c10d_rendezvous_backend": "C10dRendezvousBackend create_backend DEFAULT_PORT",
    "distributed.elastic.rendezvous.static_tcp_rendezvous": "StaticTCPRendezvous create_rdzv_handler",
    "distributed.elastic.rendezvous.utils": "parse_rendezvous_endpoint",
    "distributed.elastic.timer": (
        "configure expires TimerClient TimerRequest TimerServer FileTimerClient FileTimerRequest FileTimerServer "
        "LocalTimerClient LocalTimerServer"
    ),
    "distributed.elastic.timer.api": "RequestQueue TimerClient TimerRequest TimerServer configure expires",
    "distributed.elastic.timer.file_based_local_timer": "FileTimerClient FileTimerRequest FileTimerServer",
    "distributed.elastic.timer.local_timer": "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue",
    "distributed.elastic.metrics": f"{_METRICS} initialize_metrics",
    "distributed.elastic.metrics.api": f"{_METRICS} MetricStream",
    "distributed.elastic.events": (
        f"{_EVENTS} record record_rdzv_event construct_and_record_rdzv_event get_logging_handler"
    ),
    "distributed.elastic.events.api": _EVENTS,
    "distributed.elastic.events.handlers": "get_logging_handler",
    "distributed.elastic.utils": _UTILS,
    "distributed.elastic.utils.api": _UTILS,
    "distributed.elastic.utils.distributed": "create_c10d_store get_free_port get_socket_with_port",
    "distributed.elastic.utils.store": "store_timeout get_all synchronize barrier",
    "distributed.elastic.utils.logging": "get_logger",
    "distributed.elastic.utils.process_state": "read_proc_state is_uninterruptible_state",
    "distributed.elastic.utils.data": "CyclingIterator ElasticDistributedSampler",
    "distributed.elastic.utils.data.cycling_iterator": "CyclingIterator",
    "distributed.elastic.utils.data.elastic_distributed_sampler": "ElasticDistributedSampler",
    "numa.binding": "AffinityMode NumaOptions",
}
"""The contract's section 8: modules below `torch`, and their public names."""

_PLUMBING = (
    "torch builds it from objects of its own that are not public; `from_backend` and `create_handler` are the way"
)
_EXTRAS = "made by `start_processes`, which takes them; nobody else makes or derives from it"
_SERVER = "a step of torch's own server; here `start` and `stop` are all there is to call"

DIFFERENT: dict[str, str] = {
    "DynamicRendezvousHandler: parameter 0 is ['params'], not node": _PLUMBING,
    "DynamicRendezvousHandler: parameter 1 is ['store'], not settings": _PLUMBING,
    "DynamicRendezvousHandler: parameter 2 is ['backend'], not backend_name": _PLUMBING,
    "DynamicRendezvousHandler: parameter 3 is [], not store": _PLUMBING,
    "DynamicRendezvousHandler: parameter 4 is [], not state_holder": _PLUMBING,
    "PContext: parameter 6 is ['reaper'], not duplicate_stdout_filters": _EXTRAS,
    "PContext: parameter 7 is ['options'], not duplicate_stderr_filters": _EXTRAS,
    "FileTimerServer: has no clear_timers": _SERVER,
    "FileTimerServer: has no get_expired_timers": _SERVER,
    "FileTimerServer: has no is_process_running": _SERVER,
    "FileTimerServer: has no register_timers": _SERVER,
    "FileTimerServer: has no run_once": _SERVER,
}
"""What is called differently, and why."""

_OVERRIDDEN = (
    "_start_workers _stop_workers _monitor_workers _shutdown _rendezvous _assign_worker_ranks _initialize_workers "
    "_restart_workers _invoke_run _exit_barrier"
)
"""What agents of third parties override."""


def cases() -> Iterator[tuple[str, str]]:
    for module, names in PUBLIC.items():
        for name in names.split():
            yield module, name


def module_of_torch(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"torch.{module}")


def module_of_ours(module: str) -> Any:
    if module == "distributed":
        return import_module("rallypoint.compat")
    return import_module(f"rallypoint.compat.{module.removeprefix('distributed.')}")


def kind(thing: object) -> str:
    if isinstance(thing, type):
        return "class"
    return "function" if callable(thing) else "constant"


def parameters(thing: Any) -> list[inspect.Parameter] | None:
    """Of a call; None where Python cannot tell."""
    try:
        return list(inspect.signature(thing).parameters.values())
    except ValueError:
        return None


VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
SIMPLE = (bool, int, float, str, type(None), Enum)


def differences(ours: Any, theirs: Any) -> list[str]:
    """In what a call that torch takes would not be taken the same way."""
    # A class with a `__new__` that takes anything is called as its `__init__` says.
    made = isinstance(ours, type) and "__new__" in vars(ours) and "__init__" in vars(ours)
    expected, found = parameters(theirs), parameters(vars(ours)["__init__"] if made else ours)
    if made and found:
        found = found[1:]
    if expected is None or found is None:
        return []
    told = []
    for place, parameter in enumerate(expected):
        if parameter.kind in VARIADIC:
            if not any(each.kind is parameter.kind for each in found):
                told.append(f"takes no *{parameter.name}")
            continue
        if place >= len(found) or found[place].name != parameter.name:
            told.append(
                f"parameter {place} is {[each.name for each in found[place : place + 1]]}, not {parameter.name}"
            )
            continue
        had, has = parameter.default, found[place].default
        if had is not parameter.empty and (
            has is parameter.empty or (isinstance(had, SIMPLE) and str(had) != str(has))
        ):
            told.append(f"{parameter.name}={has!r}, not {had!r}")
    told += [
        f"{each.name} has no default"
        for each in found[len(expected) :]
        if each.default is each.empty and each.kind not in VARIADIC
    ]
    return told


def members(kind_of_torch: type) -> list[str]:
    """What torch itself defines in a class and users see."""
    own = [each for each in kind_of_torch.__mro__ if each.__module__.startswith("torch.distributed")]
    return sorted({name for each in own for name in vars(each) if not name.startswith("_")})


def has_member(ours: type, name: str) -> bool:
    """Whether a class has it, declares it, or gives it to each instance when that is made."""
    ways = [vars(each).get("__init__") for each in ours.__mro__]
    made = [way.__code__.co_names for way in ways if inspect.isfunction(way)]
    declared = [getattr(each, "__annotations__", {}) for each in ours.__mro__]
    return hasattr(ours, name) or any(name in names for names in [*made, *declared])


def all_differences(ours: Any, theirs: Any) -> list[str]:
    if not callable(theirs) or kind(theirs) == "constant":
        return []
    if isinstance(theirs, type) and issubclass(theirs, Enum):
        members_there = {each.name for each in ours}
        return [f"has no {each.name}" for each in theirs if each.name not in members_there]
    told = differences(ours, theirs)
    if not isinstance(theirs, type):
        return told
    for name in members(theirs):
        if not has_member(ours, name):
            told.append(f"has no {name}")
        elif inspect.isfunction(getattr(theirs, name)) or inspect.ismethod(getattr(theirs, name)):
            told += [f"{name}: {text}" for text in differences(getattr(ours, name), getattr(theirs, name))]
    return told


@pytest.mark.parametrize(("module", "name"), list(cases()))
def test_a_name_is_there_and_called_the_same_way(module: str, name: str) -> None:
    theirs, ours = getattr(module_of_torch(module), name), getattr(module_of_ours(module), name)
    assert kind(ours) == kind(theirs)
    if isinstance(theirs, (str, int)):
        assert ours == theirs
    told = [text for text in all_differences(ours, theirs) if f"{name}: {text}" not in DIFFERENT]
    assert told == []


def test_each_listed_difference_is_one() -> None:
    found = {
        f"{name}: {text}"
        for module, name in cases()
        for text in all_differences(getattr(module_of_ours(module), name), getattr(module_of_torch(module), name))
    }
    found |= {f"{name}: {text}" for name in _OVERRIDDEN.split() for text in differences_of_override(name)}
    assert set(DIFFERENT) <= found


@pytest.mark.parametrize("name", _OVERRIDDEN.split())
def test_methods_that_agents_of_third_parties_override(name: str) -> None:
    assert [text for text in differences_of_override(name) if f"{name}: {text}" not in DIFFERENT] == []


def differences_of_override(name: str) -> list[str]:
    module = "distributed.elastic.agent.server"
    agents = [get(module).SimpleElasticAgent for get in (module_of_ours, module_of_torch)]
    return differences(getattr(agents[0], name), getattr(agents[1], name))


def test_a_name_stands_for_one_thing_in_all_modules_of_torch() -> None:
    """So the table needs no module to tell which one is meant, but for those that it lists."""
    found: dict[tuple[str, str], set[int]] = {}
    for path in MODULES:
        theirs = module_of_torch(path if path.startswith("numa") else f"distributed.{path}")
        for name, thing in vars(theirs).items():
            home = _home(path, name)
            if home[0] and str(getattr(thing, "__module__", "")).startswith("torch."):
                found.setdefault(home, set()).add(id(thing))
    assert {home for home, things in found.items() if len(things) > 1} <= SAME_HERE


SAME_HERE = {
    ("rallypoint.compat.helpers", "get_socket_with_port"),
    ("rallypoint.observe.telemetry.handlers", "get_logging_handler"),
}
"""What torch has twice, and Rallypoint once."""


def test_what_is_not_ours_is_torchs() -> None:
    from_torch = {
        "elastic.multiprocessing.tail_log": "TailLog",
        "elastic.multiprocessing.subprocess_handler": "SubprocessHandler",
        "elastic.rendezvous.etcd_store": "EtcdStore",
        "elastic.rendezvous.c10d_rendezvous_backend": "construct_and_record_rdzv_event_of_nobody",
        "elastic.utils.log_level": "get_log_level",
        "argparse_util": "check_env",
        "elastic.timer.debug_info_logging": "log_debug_info_for_expired_timers",
    }
    missing = []
    for path, name in from_torch.items():
        ours, theirs = module_of_ours(path), module_of_torch(f"distributed.{path}")
        if getattr(ours, name, None) is None:
            missing.append(name)
        else:
            assert getattr(ours, name) is getattr(theirs, name)
    assert missing == ["construct_and_record_rdzv_event_of_nobody"]
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        import_module("rallypoint.compat.elastic.nothing")
    assert set(module_of_ours("elastic.events").__all__) == set(dir_of_torch("elastic.events"))


def dir_of_torch(path: str) -> list[str]:
    theirs = module_of_torch(f"distributed.{path}")
    return getattr(theirs, "__all__", [name for name in vars(theirs) if not name.startswith("_")])


def test_the_registry_has_torchs_name() -> None:
    registry = module_of_ours("distributed.elastic.rendezvous.registry").handler_registry
    assert registry is module_of_ours("distributed.elastic.rendezvous").rendezvous_handler_registry


def test_rallypoint_itself_does_without() -> None:
    program = "import sys, rallypoint.agent.launch, rallypoint.cli.rallyrun\nprint('rallypoint.compat' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
