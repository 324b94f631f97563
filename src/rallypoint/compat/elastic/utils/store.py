"""In the place of `torch.distributed.elastic.utils.store`."""

from __future__ import annotations

from rallypoint.store.collectives import barrier, get_all, store_timeout, synchronize

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]
