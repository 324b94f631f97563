"""`TF_CONFIG`, which TensorFlow's `TFConfigClusterResolver` and the multi-worker strategies read. Pure.

It names every worker, so each node needs the record of every other one: n times n reads in a round of n nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rallypoint.agent.preparations.worker_env.place import Kind, WorkerPlace
from rallypoint.base.endpoint import Endpoint

USE = "tf"


def variables(place: WorkerPlace) -> Mapping[str, str]:
    """See `Kind`. All are of the job `worker`, the first of which is the chief; its index is the rank."""
    records = sorted(place.records.values(), key=lambda each: each.base_rank)
    workers = [str(Endpoint(each.address, port)) for each in records for port in each.ports[USE]]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}}
    return {"TF_CONFIG": json.dumps(config)}


KIND = Kind(
    frozenset({"TF_CONFIG"}),
    variables,
    ports=lambda _group_rank, workers: workers,
    wanted=range,
)
