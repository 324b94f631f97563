"""Names that torch's modules have because they import them, and that users import or patch there.

They are looked up when first asked for: a module of ours needs none of them. To patch one changes what that module has,
and not what Rallypoint does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["reexports_of"]

_HERE = "rallypoint.compat."
_EVENTS, _METRICS, _RENDEZVOUS = "elastic.events", "elastic.metrics", "elastic.rendezvous.api"
_AGENT, _LOCAL = "elastic.agent.server.api", "elastic.agent.server.local_elastic_agent"
_HEALTH, _PROCESSES = "elastic.agent.server.health_check_server", "elastic.multiprocessing.api"
_ERRORS, _UTILS, _LOGGING = "elastic.multiprocessing.errors", "elastic.utils.api", "elastic.utils.logging"
_RENDEZVOUS_UTILS = "elastic.rendezvous.utils"

_HOMES: dict[str, dict[str, str]] = {
    "launcher.api": {
        _LOCAL: "LocalElasticAgent TORCHELASTIC_HEALTH_CHECK_PORT",
        _AGENT: "WorkerSpec",
        _HEALTH: "HealthCheckServer create_healthcheck_server",
        _PROCESSES: "DefaultLogsSpecs LogsSpecs SignalException",
        _ERRORS: "ChildFailedError",
        _RENDEZVOUS: "RendezvousParameters",
        _RENDEZVOUS_UTILS: "parse_rendezvous_endpoint",
        _LOGGING: "get_logger",
        "numa.binding": "NumaOptions",
    },
    _AGENT: {
        _EVENTS: "Event EventSource record",
        _METRICS: "prof put_metric",
        _ERRORS: "ProcessFailure",
        _RENDEZVOUS: "RendezvousGracefulExitError",
        _PROCESSES: "SignalException",
        _LOGGING: "get_logger",
        "numa.binding": "NumaOptions",
    },
    _LOCAL: {
        _AGENT: "RunResult SimpleElasticAgent WorkerGroup WorkerSpec WorkerState",
        _HEALTH: "HealthCheckServer create_healthcheck_server",
        _PROCESSES: "LogsSpecs PContext start_processes",
        _METRICS: "prof",
        _UTILS: "macros",
        _LOGGING: "get_logger",
        "elastic.utils.process_state": "is_uninterruptible_state read_proc_state",
    },
    "elastic.rendezvous.dynamic_rendezvous": {
        _RENDEZVOUS: (
            "RendezvousClosedError RendezvousError RendezvousGracefulExitError RendezvousHandler RendezvousInfo "
            "RendezvousParameters RendezvousStateError RendezvousStoreInfo RendezvousTimeoutError"
        ),
        _EVENTS: "NodeState construct_and_record_rdzv_event",
    },
    "elastic.rendezvous.registry": {
        _RENDEZVOUS: "RendezvousHandler RendezvousParameters",
        "elastic.rendezvous.dynamic_rendezvous": "create_handler",
    },
    "elastic.multiprocessing": {"numa.binding": "NumaOptions", _LOGGING: "get_logger"},
    _PROCESSES: {
        "numa.binding": "NumaOptions",
        _ERRORS: "record",
        "elastic.multiprocessing.subprocess_handler": "SubprocessHandler get_subprocess_handler",
        "elastic.multiprocessing.tail_log": "TailLog",
    },
    "run": {_PROCESSES: "DefaultLogsSpecs LogsSpecs Std", _UTILS: "macros", _LOGGING: "get_logger"},
    _HEALTH: {_LOGGING: "get_logger"},
    _ERRORS: {_LOGGING: "get_logger"},
    "elastic.multiprocessing.errors.handlers": {_ERRORS: "ErrorHandler"},
    _RENDEZVOUS: {"elastic.utils.distributed": "get_free_port"},
    "elastic.rendezvous.c10d_rendezvous_backend": {
        _EVENTS: "NodeState construct_and_record_rdzv_event",
        _RENDEZVOUS: "RendezvousError RendezvousStateError",
        "elastic.rendezvous.dynamic_rendezvous": "RendezvousBackend",
        _RENDEZVOUS_UTILS: "parse_rendezvous_endpoint",
    },
    "elastic.rendezvous.static_tcp_rendezvous": {
        _RENDEZVOUS: "RendezvousHandler RendezvousInfo RendezvousStoreInfo",
        _RENDEZVOUS_UTILS: "parse_rendezvous_endpoint",
    },
    "elastic.timer.file_based_local_timer": {
        "elastic.timer.api": "TimerClient TimerRequest",
        "elastic.timer.debug_info_logging": "log_debug_info_for_expired_timers",
        _LOGGING: "get_logger",
    },
    "elastic.timer.local_timer": {"elastic.timer.api": "RequestQueue TimerClient TimerRequest TimerServer"},
    "elastic.utils.distributed": {"elastic.utils.store": "barrier", _LOGGING: "get_logger"},
    _LOGGING: {"elastic.utils.log_level": "get_log_level"},
}
"""Module to the modules whose names it has as well."""


def reexports_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of ours."""
    homes = {name: home for home, names in _HOMES[module.removeprefix(_HERE)].items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(_HERE + homes[name]), name)

    return find
