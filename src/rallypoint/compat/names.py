"""Creates torch's modules below `rallypoint.compat` from a table of names, when they are imported.

Laws:

1. In a module in the table, the table's names are Rallypoint's. Every other name, and every other module, is torch's.
2. torch is imported on the first use of one of its names, not earlier.
3. Names are unique across torch's modules, except for those in `ELSEWHERE`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_HERE = "rallypoint.compat"

_PACKAGES = {
    "": "elastic launcher numa run",
    "numa": "binding",
    "launcher": "api",
    "elastic": "agent events metrics multiprocessing rendezvous timer utils",
    "elastic.agent": "server",
    "elastic.agent.server": "api health_check_server local_elastic_agent",
    "elastic.events": "api handlers",
    "elastic.metrics": "api",
    "elastic.multiprocessing": "api errors",
    "elastic.multiprocessing.errors": "error_handler handlers",
    "elastic.rendezvous": "api c10d_rendezvous_backend dynamic_rendezvous registry static_tcp_rendezvous utils",
    "elastic.timer": "api file_based_local_timer local_timer",
    "elastic.utils": "api data distributed logging process_state store",
    "elastic.utils.data": "cycling_iterator elastic_distributed_sampler",
}
"""Modules that contain names of ours, by package."""

MODULES = frozenset(f"{package}.{name}".lstrip(".") for package, names in _PACKAGES.items() for name in names.split())

HOMES = {
    "rallypoint.agent.workers": (
        "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
    ),
    "rallypoint.agent.spec": "DEFAULT_ROLE RunResult Worker WorkerGroup WorkerSpec WorkerState",
    "rallypoint.base.errors": "SignalException",
    "rallypoint.base.numa": "AffinityMode NumaOptions",
    "rallypoint.base.procfs": "is_uninterruptible_state read_proc_state",
    "rallypoint.compat.agent": "ElasticAgent LocalElasticAgent SimpleElasticAgent",
    "rallypoint.compat.handlers": (
        "C10dRendezvousBackend DynamicRendezvousHandler RendezvousSettings RendezvousTimeout StaticTCPRendezvous "
        "create_backend create_handler"
    ),
    "rallypoint.compat.helpers": (
        "create_c10d_store get_env_variable_or_raise get_free_port get_logger get_socket_with_port "
        "parse_rendezvous_endpoint"
    ),
    "rallypoint.compat.processes": "MultiprocessContext SubprocessContext get_std_cm start_processes",
    "rallypoint.compat.timers": (
        "FileTimerServer LocalTimerClient LocalTimerServer MultiprocessingRequestQueue RequestQueue TimerServer"
    ),
    "rallypoint.data": "CyclingIterator ElasticDistributedSampler",
    "rallypoint.failures.failure": "ProcessFailure",
    "rallypoint.failures.record": "ErrorHandler get_error_handler record",
    "rallypoint.failures.report": "ChildFailedError",
    "rallypoint.observe.health": "HealthCheckServer TORCHELASTIC_HEALTH_CHECK_PORT create_healthcheck_server",
    "rallypoint.agent.launch": "LaunchConfig elastic_launch launch_agent",
    "rallypoint.workers.logs.specs": "DefaultLogsSpecs LogsDest LogsSpecs Std to_map",
    "rallypoint.control.protocol.errors": (
        "RendezvousClosedError RendezvousConnectionError RendezvousError RendezvousGracefulExitError "
        "RendezvousStateError RendezvousTimeoutError"
    ),
    "rallypoint.rendezvous.shared_state": "RendezvousBackend Token",
    "rallypoint.rendezvous.handler": (
        "RendezvousHandler RendezvousHandlerCreator RendezvousHandlerRegistry RendezvousInfo RendezvousStoreInfo "
        "get_rendezvous_handler rendezvous_handler_registry"
    ),
    "rallypoint.rendezvous.params": "RendezvousParameters",
    "rallypoint.store.collectives": "barrier get_all store_timeout synchronize",
    "rallypoint.observe.telemetry.agent_events": "Event EventMetadataValue EventSource NodeState RdzvEvent",
    "rallypoint.observe.telemetry.handlers": "construct_and_record_rdzv_event get_logging_handler record_rdzv_event",
    "rallypoint.observe.telemetry.metrics": (
        "ConsoleMetricHandler MetricData MetricHandler MetricStream MetricsConfig NullMetricHandler configure "
        "getStream get_elapsed_time_ms initialize_metrics prof profile publish_metric put_metric"
    ),
    "rallypoint.workers.timers": "FileTimerClient FileTimerRequest TimerClient TimerRequest expires",
    "rallypoint.workers.context": "PContext RunProcsResult macros",
}
"""Our modules, and the names in each."""

_HOME_OF = {name: home for home, names in HOMES.items() for name in names.split()}

ELSEWHERE = {
    ("elastic.agent.server.api", "record"): ("rallypoint.observe.telemetry.handlers", "record"),
    ("elastic.events", "record"): ("rallypoint.observe.telemetry.handlers", "record"),
    ("elastic.events.handlers", "_log_handlers"): ("rallypoint.observe.telemetry.handlers", "log_handlers"),
    ("elastic.rendezvous.c10d_rendezvous_backend", "DEFAULT_PORT"): ("rallypoint.compat.handlers", "DEFAULT_PORT"),
    ("elastic.rendezvous.registry", "handler_registry"): (
        "rallypoint.rendezvous.handler",
        "rendezvous_handler_registry",
    ),
    ("elastic.rendezvous.static_tcp_rendezvous", "create_rdzv_handler"): (
        "rallypoint.rendezvous.backends.static",
        "create_handler",
    ),
    ("elastic.timer", "configure"): ("rallypoint.workers.timers", "configure"),
    ("elastic.timer.api", "configure"): ("rallypoint.workers.timers", "configure"),
}
"""Maps module and name to our module and name, if the name alone is ambiguous."""


def names_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` for a module in this package."""
    path = module.removeprefix(_HERE).lstrip(".")

    def find(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # Python looks for such names in any module
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        below = f"{path}.{name}".lstrip(".")
        if below in MODULES:
            return import_module(f"{_HERE}.{below}")
        home, attribute = _home(path, name)
        return getattr(import_module(home), attribute) if home else _of_torch(path, name)

    return find


def _home(path: str, name: str) -> tuple[str, str]:
    """The home of a module's name in our modules: module and name; empty texts if the name is torch's."""
    if path not in MODULES:
        return "", ""
    return ELSEWHERE.get((path, name)) or (_HOME_OF.get(name, ""), name)


def _of_torch(path: str, name: str) -> Any:
    module = _torchs(path)
    if name == "__all__":
        return getattr(module, name, [attribute for attribute in vars(module) if not attribute.startswith("_")])
    if hasattr(module, name):
        return getattr(module, name)
    raise AttributeError(f"neither Rallypoint nor {module.__name__} has {name!r}")


def _torchs(path: str) -> ModuleType:
    """torch's module for a module here. Raises ImportError."""
    here = f"{_HERE}.{path}".rstrip(".")
    name = f"torch.{path}" if path.split(".", maxsplit=1)[0] == "numa" else f"torch.distributed.{path}".rstrip(".")
    try:
        module = import_module(name)
        own: ModuleType = getattr(module, "torchs_own", module)  # if `rallyctl shim` replaced it with ours
        return own
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in {"torch", "torch.distributed"}:
            raise ModuleNotFoundError(f"{here} does not exist, because torch has no {name}", name=here) from error
        raise ImportError(
            f"{here} takes this name from {name}, which cannot be imported here ({error}); install torch, or do not "
            "use the name",
            name=here,
        ) from error


class _Torchs(ModuleType):
    """A torch module with our names."""

    def __getattr__(self, name: str) -> Any:
        value = names_of(self.__name__)(name)
        if not name.startswith("__"):
            setattr(self, name, value)
        return value


class _Finder(Loader):
    """Finds and loads modules of this package that are not files."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module."""
        if not name.startswith(f"{_HERE}."):
            return None
        below = name.removeprefix(f"{_HERE}.")
        is_package = below in _PACKAGES if below in MODULES else hasattr(_torchs(below), "__path__")
        return ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create a module, which is empty until first use."""
        return _Torchs(spec.name, f"In the place of a module of torch: see `{__name__}`.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def install() -> None:
    """Let Python find these modules, after those that are files."""
    sys.meta_path.append(_Finder())
