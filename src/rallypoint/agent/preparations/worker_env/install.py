"""Gives the workers of an agent the variables of other frameworks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.agent.controller import WorkerController
from rallypoint.agent.preparations.peer_exchange import exchange_of
from rallypoint.agent.preparations.peer_record import PeerRecord
from rallypoint.agent.preparations.worker_env.kinds import KINDS, checked
from rallypoint.agent.preparations.worker_env.place import Kind, WorkerPlace
from rallypoint.agent.preparations.worker_env.reserved import ReservedPorts
from rallypoint.agent.spec import Worker, WorkerGroup
from rallypoint.base.devices import cuda_count

if TYPE_CHECKING:
    from rallypoint.protocol.messages import Placement


def add_worker_env(workers: WorkerController, names: Sequence[str], nodes: int) -> None:
    """Give these kinds of variables to the workers of each round.

    Args:
        workers: of an agent that has not run yet.
        names: of the kinds (`kinds.KINDS`), or `torch`.
        nodes: the maximal number of nodes of the job.

    Raises:
        UserError: there is no such kind, or the nodes cannot exchange what it needs.
    """
    kinds = [FrameworkVariables(name, KINDS[name], workers.group) for name in checked(names)]
    for each in kinds:
        workers.group.variable_sources.append(each)
        if each.kind.wanted is not None:
            exchange_of(workers, nodes, f"--worker-env={each.use}").users.append(each)


class FrameworkVariables:
    """The variables of one kind: a `PeerUser` and a `VariableSource`."""

    def __init__(self, name: str, kind: Kind, group: WorkerGroup) -> None:
        self.use = name
        self.kind = kind
        self.names = kind.names
        self._group = group
        self._reserved = ReservedPorts()
        self._records: Mapping[int, PeerRecord] = {}
        self._gpus = -1

    def reserve(self, group: WorkerGroup) -> Sequence[int]:
        """See `PeerUser`."""
        assert group.placement is not None
        count = self.kind.ports(group.placement.group_rank, group.spec.local_world_size) if self.kind.ports else 0
        return self._reserved.reserve(count)

    def wanted(self, placement: Placement) -> Collection[int]:
        """See `PeerUser`."""
        return self.kind.wanted(placement.group_world_size) if self.kind.wanted else ()

    def take(self, records: Mapping[int, PeerRecord]) -> None:
        """See `PeerUser`."""
        for each in records.values():
            wanted = self.kind.ports(each.group_rank, each.local_world_size) if self.kind.ports else 0
            if len(each.ports.get(self.use, ())) < wanted:
                raise ValueError(f"{each.node} has no port for {self.use}; start all nodes with the same --worker-env")
        self._records = records

    def missed(self, why: str) -> bool:
        """See `PeerUser`: without the records there are no variables."""
        return False

    def close(self) -> None:
        """See `PeerUser`."""
        self._reserved.close()

    def variables(self, worker: Worker, environment: Mapping[str, str]) -> Mapping[str, str]:
        """See `VariableSource`."""
        if self._gpus < 0:
            self._gpus = cuda_count(os.environ)
        virtual = self._group.spec.virtual_local_rank
        place = WorkerPlace(
            worker.global_rank,
            worker.world_size,
            int(environment["LOCAL_RANK"]),
            self._group.spec.local_world_size,
            self._records,
            os.environ,
            min(self._gpus, 1) if virtual else self._gpus,
            shares_gpus=not virtual,
        )
        return self.kind.variables(place)
