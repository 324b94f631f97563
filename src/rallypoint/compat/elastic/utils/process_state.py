"""In the place of `torch.distributed.elastic.utils.process_state`."""

from __future__ import annotations

from rallypoint.base.procfs import is_uninterruptible_state, read_proc_state

__all__ = ["is_uninterruptible_state", "read_proc_state"]
