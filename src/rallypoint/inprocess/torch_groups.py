"""Aborts and destroys torch's process groups at the end of a round. torch is looked up, and never imported."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from rallypoint.inprocess.connections import end_connections

_C10D = "torch.distributed.distributed_c10d"
_MAKES_A_GROUP = "_new_process_group_helper"
"""The function of torch that makes a process group."""


def abort() -> None:
    """Make every wait for another worker return, on whichever thread it is."""
    c10d = _c10d()
    if c10d is None:
        return
    end_connections(_number("MASTER_PORT"), _number("WORLD_SIZE") if _makes_a_group() else 0)
    _abort_groups(c10d)


def destroy() -> None:
    """Forget all groups, so that `init_process_group` can be called again. After `abort`, in the main thread.

    Raises:
        Exception: whatever torch raises.
    """
    c10d = _c10d()
    if c10d is None:
        return
    names = c10d._world.pg_names
    if not c10d.is_initialized() and names:  # interrupted while the first group was made
        c10d._update_default_pg(next(iter(names)))
    if c10d.is_initialized():
        c10d.destroy_process_group()
    # A group that was counted and never made would give the next ones other names than they have in new workers.
    c10d._world.group_count = 0


def _makes_a_group() -> bool:
    """Whether the main thread is making a group, and so may wait for others to connect."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != _MAKES_A_GROUP:
        frame = frame.f_back
    return frame is not None


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


def _c10d() -> Any:
    """torch's module of groups; None if it has not been imported, or not completely yet."""
    found = sys.modules.get(_C10D)
    return found if hasattr(found, "init_process_group") and hasattr(found, "_world") else None


def _abort_groups(c10d: Any) -> None:
    """Abort NCCL's groups, all at once, as torch itself does before it forgets them."""
    groups = sorted(dict(c10d._world.pg_names).items(), key=lambda item: item[1], reverse=True)
    nccl = _nccl_backend(c10d)
    if nccl is not None:
        nccl._group_start()  # so that the aborts of several communicators do not wait for each other
    try:
        for group, _ in groups:
            group.abort()
    finally:
        if nccl is not None:
            nccl._group_end()


def _nccl_backend(c10d: Any) -> Any:
    default = c10d.GroupMember.WORLD
    if default is None or not c10d.is_nccl_available():
        return None
    try:
        backend = default._get_backend(sys.modules["torch"].device("cuda"))
    except RuntimeError:  # a group for CPUs only
        return None
    return backend if isinstance(backend, c10d.ProcessGroupNCCL) else None
