"""In the place of `torch.distributed.elastic.multiprocessing.subprocess_handler.handlers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.compat.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions

__all__ = ["get_subprocess_handler"]


def get_subprocess_handler(
    entrypoint: str,
    args: Sequence[Any],
    env: Mapping[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    """Start a program; the arguments are those of `SubprocessHandler`."""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)
