"""Converts `Options` to the launcher's input: a `LaunchConfig`, an entry point and its arguments.

Checks whose message names the flag are made here (contract section 1.13); lower layers check the rest.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping

from rallypoint.base.errors import UsageError, UserError, user_error
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_number
from rallypoint.cli.parse import Options, naming
from rallypoint.cli.rendezvous_choice import choose_rendezvous
from rallypoint.cli.sizes import local_world_size, parse_nnodes
from rallypoint.launch.config import LaunchConfig
from rallypoint.logs.specs import TEMPLATE_VARIABLE, host_label, with_host

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.logs.specs import LogsSpecs, Std

_log = get_logger(__name__)

_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


EntryPoint = str | Callable[..., None]


def config_from_options(
    options: Options, environ: Mapping[str, str]
) -> tuple[LaunchConfig, EntryPoint, tuple[str, ...]]:
    """The configuration, the program or function to run, and its arguments, with `${local_rank}` still
    in them.

    Raises:
        UserError: a value that cannot work.
    """
    low, high = parse_nnodes(options.nnodes, options.source("nnodes"))
    _check(options, environ)
    program, arguments = entry_point(options, environ)
    choice = choose_rendezvous(options, high)
    size = local_world_size(options.nproc_per_node, environ, options.source("nproc_per_node"))
    _log.info("workers on this node: %d (--nproc-per-node=%s)", size, options.nproc_per_node)
    _check_devices(options, environ, size)
    _check_event_handler(options)
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=size,
        logs_specs=_logs_specs(options),
        run_id=choice.run_id,
        role=options.role,
        rdzv_endpoint=choice.endpoint,
        rdzv_backend=choice.backend,
        rdzv_configs=choice.configs,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        start_method=options.start_method,
        log_line_prefix_template=with_host(environ.get(TEMPLATE_VARIABLE), host_label(options.host_prefix, environ)),
        local_addr=options.local_addr,
        event_log_handler=options.event_log_handler,
        numa_options=_numa_options(options, environ, size),
        signals_to_handle=options.signals_to_handle,
        duplicate_stdout_filters=list(options.duplicate_stdout_filters),
        duplicate_stderr_filters=list(options.duplicate_stderr_filters),
        virtual_local_rank=options.virtual_local_rank,
        shutdown_timeout=options.shutdown_timeout,
        inprocess_timeout=options.inprocess_timeout,
        preempt_signals=options.preempt_signals,
        stop_before_end=options.stop_before_end,
        requeue=options.requeue,
        node_rank=choice.node_rank,
        endpoint_flag=choice.endpoint_flag,
        endpoint_given=choice.endpoint_given,
        preload=options.preload,
        worker_env=options.worker_env,
        socket_ifname=options.socket_ifname,
        progress_file=_progress_file(options),
        incident_dir=_incident_dir(options),
        tee_collapse=options.tee_collapse,
        preflight=options.preflight,
        node_check=options.node_check,
        node_check_timeout=options.node_check_timeout,
        hang_timeout=options.hang_timeout,
        on_hang=options.on_hang,
        flight_recorder=options.flight_recorder,
    )
    return config, program, arguments


def _check(options: Options, environ: Mapping[str, str]) -> None:
    """Check what can be checked of the values alone."""
    _check_bounds(options)
    _check_signals(options)
    if options.preempt_signals or options.stop_before_end or options.requeue:
        from rallypoint.cli.preemption import check_preemption

        check_preemption(options, environ)
    if options.on_hang != "report" and not options.hang_timeout:
        _log.warning("%s=%s does nothing without --hang-timeout", options.source("on_hang"), options.on_hang)
    _check_backend(options)


def entry_point(options: Options, environ: Mapping[str, str]) -> tuple[EntryPoint, tuple[str, ...]]:
    """The program or function that each worker runs, and its arguments (contract section 1.7).

    Raises:
        UserError: `--no-python` and `--module` together.
    """
    script, arguments = options.training_script, options.training_script_args
    if options.run_path:
        from rallypoint.workers.functions.worker import run_script_path

        return run_script_path, (script, *arguments)
    if options.no_python:
        if options.module:
            no_python, module = options.source("no_python"), options.source("module")
            raise UserError(f"{no_python} runs a program and {module} a Python module; use one of the two")
        return script, arguments
    python = environ.get("PYTHON_EXEC", sys.executable)
    module_flag = ("-m",) if options.module else ()
    return python, ("-u", *module_flag, script, *arguments)


def limit_threads(config: LaunchConfig, environ: MutableMapping[str, str]) -> None:
    """Set one OpenMP thread for each of several workers, unless the user has set a number (contract section 1.10)."""
    if config.nproc_per_node < 2 or "OMP_NUM_THREADS" in environ:
        return
    environ["OMP_NUM_THREADS"] = "1"
    bar = "*" * 41
    _log.warning(
        "\n%s\nOMP_NUM_THREADS is not set: each of the %d workers gets OMP_NUM_THREADS=1, so that together they do not "
        "overload this machine. Set it to what suits your program best.\n%s",
        bar,
        config.nproc_per_node,
        bar,
    )


_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_restarts": (lambda value: value >= 0, "0 or more"),
    "monitor_interval": (lambda value: value > 0, "above 0 seconds"),  # which not-a-number is not
    "shutdown_timeout": (lambda value: value >= 0, "0 seconds or more"),
}


def _check_bounds(options: Options) -> None:
    for dest, (fits, allowed) in _BOUNDS.items():
        value = getattr(options, dest)
        if value is not None and not fits(value):
            raise user_error(f"{options.source(dest)}={value} is out of range; give {allowed}", AssertionError)


def _check_backend(options: Options) -> None:
    if options.standalone:
        return
    from rallypoint.rendezvous.registry import rendezvous_handler_registry

    with naming(f"{options.source('rdzv_backend')}={options.rdzv_backend}"):
        rendezvous_handler_registry.find(options.rdzv_backend)


def _check_signals(options: Options) -> None:
    source = options.source("signals_to_handle")
    for name in options.signals_to_handle.split(","):
        number = signal_number(name)
        if number is None:
            _log.warning("%s names %r, which is not a signal of this system; it is ignored", source, name.strip())
        elif number in _UNCATCHABLE:
            raise UserError(f"{source} names {number.name}, which cannot be handled; leave it out")


def _check_devices(options: Options, environ: Mapping[str, str], workers: int) -> None:
    """Check the devices that every start of workers will need, before the rendezvous."""
    if options.virtual_local_rank:
        from rallypoint.base.devices import one_gpu_per_worker

        with naming(options.source("virtual_local_rank")):
            one_gpu_per_worker(environ, workers)


def _numa_options(options: Options, environ: Mapping[str, str], workers: int) -> NumaOptions | None:
    if options.numa_binding is None:
        return None
    from rallypoint.base.numa import NumaOptions
    from rallypoint.base.topology import worker_cpus

    with naming(f"{options.source('numa_binding')}={options.numa_binding}"):
        wanted = NumaOptions(options.numa_binding)
        worker_cpus(wanted, workers, environ)
    return wanted


def _check_event_handler(options: Options) -> None:
    if options.event_log_handler == "null":
        return
    from rallypoint.telemetry.handlers import get_logging_handler

    with naming(options.source("event_log_handler")):
        get_logging_handler(options.event_log_handler)


def _progress_file(options: Options) -> str:
    path = options.progress_file
    if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise UserError(
            f"{options.source('progress_file')}={path} cannot be a file that workers write: "
            f"{'it is a folder' if os.path.isdir(path) else 'there is no such folder'}; name a file in a folder that "
            "is there"
        )
    return os.path.abspath(path) if path else ""


def _incident_dir(options: Options) -> str:
    """The folder, made now, so that a failure to make it shows before it is needed."""
    path = options.incident_dir
    try:
        if path:
            os.makedirs(path, exist_ok=True)
        if not path or os.access(path, os.W_OK | os.X_OK):
            return os.path.abspath(path) if path else ""
        why = "it cannot be written to"
    except OSError as error:
        why = error.strerror or str(error)
    source = options.source("incident_dir")
    raise UsageError(f"{source}={path} cannot be a folder for incidents: {why}; name a folder of your own")


def _logs_specs(options: Options) -> LogsSpecs:
    from rallypoint.logs.specs import DefaultLogsSpecs, plugin_specs

    if options.preflight and options.log_dir:
        from rallypoint.launch.preflight import await_log_dir

        await_log_dir(options.log_dir, options.preflight)
    arguments: dict[str, Any] = {
        "log_dir": options.log_dir or None,
        "redirects": _streams(options, "redirects"),
        "tee": _streams(options, "tee"),
        "local_ranks_filter": _local_ranks(options),
    }
    if options.logs_specs in (None, "default"):
        _check_filters(options)
        return DefaultLogsSpecs(**arguments)
    with naming(f"{options.source('logs_specs')}={options.logs_specs}"):
        return plugin_specs(options.logs_specs, **arguments)


def _check_filters(options: Options) -> None:
    for dest in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if getattr(options, dest) and options.log_dir == os.devnull:
            raise UserError(
                f"{options.source(dest)} writes a file of filtered lines, and "
                f"{options.source('log_dir')}={options.log_dir} is not a folder; name one there"
            )


def _streams(options: Options, dest: str) -> Std | dict[int, Std]:
    from rallypoint.logs.specs import Std

    with naming(options.source(dest)):
        return Std.from_str(getattr(options, dest))


def _local_ranks(options: Options) -> set[int] | None:
    text = options.local_ranks_filter
    if not text:
        return None
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        source = options.source("local_ranks_filter")
        raise UserError(f"{source}={text!r} is not a list of local ranks; separate them by commas: 0,2") from None
