"""Makes and starts contexts in one call, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rallypoint.workers.context import PContext, ProcessOptions, SubprocessContext
from rallypoint.workers.functions.context import FunctionContext
from rallypoint.workers.logs.specs import LogsSpecs


def start_processes(
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    specs: LogsSpecs,
    start_method: str = "spawn",
) -> PContext:
    """Start a context of a program or a function."""
    options = ProcessOptions(start_method=start_method)
    kind: type[PContext] = SubprocessContext if isinstance(entrypoint, str) else FunctionContext
    context = kind("group", entrypoint, args, envs, specs, options=options)
    context.start()
    return context
