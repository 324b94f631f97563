"""In the place of `torch.distributed.elastic.utils.data.cycling_iterator`."""

from __future__ import annotations

from rallypoint.data.cycling import CyclingIterator

__all__ = ["CyclingIterator"]
