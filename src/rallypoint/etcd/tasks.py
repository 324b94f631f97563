"""Tasks for whatever uses grpclib, which runs in a task of its own.

grpclib cancels the task that waits when a connection ends, and turns that into an error; after that, `asyncio.timeout`
in the same task would no longer know its own cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose failure need not be looked at."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)
    return task


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, from a task of its own. Whoever waits can be cancelled even if the work would not be."""
    task = start_task(work)
    try:
        await asyncio.wait({task})
        return task.result()
    finally:
        task.cancel()
