"""In the place of `torch.distributed.elastic.utils.data`."""

from __future__ import annotations

from rallypoint.data.cycling import CyclingIterator
from rallypoint.data.sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
