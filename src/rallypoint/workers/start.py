"""The one place that chooses the context: for programs, or for functions by each start method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.light_typing import Any
from rallypoint.logs.specs import LogsSpecs
from rallypoint.workers.context import PContext, ProcessOptions
from rallypoint.workers.local import SubprocessContext
from rallypoint.workers.reaper.client import ReaperClient


def make_context(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    options: ProcessOptions | None = None,
    reaper: ReaperClient | None = None,
) -> PContext:
    """Make the context of one process for each local rank (contract section 6.1). Makes the folders; `start` starts the
    processes.

    Args:
        name, args, envs, logs_specs, log_line_prefixes: see `PContext`; a program's arguments are made strings.
        entrypoint: a program to run, or a function to call.
        options: further options of the processes.
        reaper: the reaper that starts them; None for one that ends with the context.

    Raises:
        UserError: the ranks of `args` or `envs` are not 0 to n-1, or there is no such start method.
    """
    if isinstance(entrypoint, str):
        return SubprocessContext(name, entrypoint, args, envs, logs_specs, log_line_prefixes, reaper, options)
    from rallypoint.workers.functions.context import FunctionContext

    return FunctionContext(name, entrypoint, args, envs, logs_specs, log_line_prefixes, reaper, options)
