"""From `Options` to what the launcher is given: a `LaunchConfig`, an entry point and its arguments.

Checks that need the flag's name for their message are made here (contract section 1.13); what the rooms below check
for themselves is left to them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_number
from rallypoint.cli.later import refuse_unfinished
from rallypoint.cli.parse import Options
from rallypoint.cli.place import choose_place
from rallypoint.cli.sizes import local_world_size, parse_nnodes
from rallypoint.launch.config import LaunchConfig

if TYPE_CHECKING:
    from rallypoint.logs.specs import LogsSpecs
    from rallypoint.logs.std import Std

_log = get_logger(__name__)

_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


def config_from_options(options: Options, environ: Mapping[str, str]) -> tuple[LaunchConfig, str, tuple[str, ...]]:
    """What to launch.

    Args:
        options: the command line.
        environ: the agent's environment.

    Returns:
        The configuration, the program to run, and its arguments (with `${local_rank}` still in them).

    Raises:
        UserError: a value that cannot work, or one whose work comes in a later release.
    """
    refuse_unfinished(options)
    low, high = parse_nnodes(options.nnodes, options.source("nnodes"))
    _check_bounds(options)
    _check_signals(options)
    program, arguments = entry_point(options, environ)
    place = choose_place(options, high)
    size = local_world_size(options.nproc_per_node, environ, options.source("nproc_per_node"))
    _log.info("workers on this node: %d (--nproc-per-node=%s)", size, options.nproc_per_node)
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=size,
        logs_specs=_logs_specs(options),
        run_id=place.run_id,
        role=options.role,
        rdzv_endpoint=place.endpoint,
        rdzv_backend=place.backend,
        rdzv_configs=place.configs,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        start_method=options.start_method,
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        local_addr=options.local_addr,
        event_log_handler=options.event_log_handler,
        signals_to_handle=options.signals_to_handle,
        duplicate_stdout_filters=list(options.duplicate_stdout_filters),
        duplicate_stderr_filters=list(options.duplicate_stderr_filters),
        virtual_local_rank=options.virtual_local_rank,
        shutdown_timeout=options.shutdown_timeout,
        node_rank=place.node_rank,
    )
    return config, program, arguments


def entry_point(options: Options, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The program that each worker runs, and its arguments (contract section 1.7).

    Raises:
        UserError: `--no-python` and `--module` together.
    """
    script, arguments = options.training_script, options.training_script_args
    if options.no_python:
        if options.module:
            no_python, module = options.source("no_python"), options.source("module")
            raise UserError(f"{no_python} runs a program and {module} a Python module; use one of the two")
        return script, arguments
    python = environ.get("PYTHON_EXEC", sys.executable)
    module_flag = ("-m",) if options.module else ()
    return python, ("-u", *module_flag, script, *arguments)


def limit_threads(config: LaunchConfig, environ: MutableMapping[str, str]) -> None:
    """Give each of several workers one OpenMP thread where the user has not said how many (contract section 1.10)."""
    if config.nproc_per_node < 2 or "OMP_NUM_THREADS" in environ:
        return
    environ["OMP_NUM_THREADS"] = "1"
    bar = "*" * 41
    _log.warning(
        "\n%s\nOMP_NUM_THREADS is not set: each of the %d workers gets OMP_NUM_THREADS=1, so that together they do not "
        "overload this machine. Set it yourself to what suits your program best.\n%s",
        bar,
        config.nproc_per_node,
        bar,
    )


def _check_bounds(options: Options) -> None:
    def refuse(dest: str, allowed: str) -> None:
        raise UserError(f"{options.source(dest)}={getattr(options, dest)} cannot be; it must be {allowed}")

    if options.max_restarts < 0:
        refuse("max_restarts", "0 or more")
    if not options.monitor_interval > 0:  # not-a-number is not above 0 either
        refuse("monitor_interval", "above 0 seconds")
    if options.shutdown_timeout is not None and options.shutdown_timeout < 0:
        refuse("shutdown_timeout", "0 seconds or more")


def _check_signals(options: Options) -> None:
    source = options.source("signals_to_handle")
    for name in options.signals_to_handle.split(","):
        number = signal_number(name)
        if number is None:
            _log.warning("%s names %r, which is no signal of this system; it is skipped", source, name.strip())
        elif number in _UNCATCHABLE:
            raise UserError(f"{source} names {number.name}, which no process can handle; leave it out")


def _logs_specs(options: Options) -> LogsSpecs:
    from rallypoint.logs.specs import DefaultLogsSpecs

    return DefaultLogsSpecs(
        log_dir=options.log_dir or None,
        redirects=_streams(options, "redirects"),
        tee=_streams(options, "tee"),
        local_ranks_filter=_local_ranks(options),
    )


def _streams(options: Options, dest: str) -> Std | dict[int, Std]:
    from rallypoint.logs.std import Std

    try:
        return Std.from_str(getattr(options, dest))
    except UserError as error:
        raise UserError(f"{options.source(dest)}: {error}") from None


def _local_ranks(options: Options) -> set[int] | None:
    text = options.local_ranks_filter
    if not text:
        return None
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        source = options.source("local_ranks_filter")
        raise UserError(
            f"{source}={text!r} is not a list of local ranks; write them with commas between: 0,2"
        ) from None
