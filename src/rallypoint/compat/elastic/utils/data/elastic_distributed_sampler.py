"""In the place of `torch.distributed.elastic.utils.data.elastic_distributed_sampler`."""

from __future__ import annotations

from rallypoint.data.sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
