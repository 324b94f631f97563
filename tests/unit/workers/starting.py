"""Contexts that are made and started in one go, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rallypoint.logs.specs import LogsSpecs
from rallypoint.workers.context import PContext, ProcessOptions
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.start import make_context


def start_processes(
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    specs: LogsSpecs,
    start_method: str = "spawn",
    reaper: ReaperClient | None = None,
) -> PContext:
    """See `make_context`."""
    options = ProcessOptions(start_method=start_method)
    context = make_context("group", entrypoint, args, envs, specs, options=options, reaper=reaper)
    context.start()
    return context
