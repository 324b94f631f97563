"""Variables for frameworks other than torch in a worker's environment (`--worker-env`).

`KINDS` is the table; each kind is a pure function. In each round, ports are reserved and addresses exchanged before its
workers start (`round_setup`).

jax: the variables that `jax.distributed.initialize()` reads without arguments.

jax itself reads only the coordinator's address and the local devices. It takes the number and rank of processes from
the first cluster that it detects. The first that it looks for is Open MPI's mpirun, by `OMPI_MCA_orte_hnp_uri`. So a
worker gets that variable and the three numbers that jax then reads. `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` are for
programs that pass them on themselves (Kubeflow Trainer sets the same).

Under Slurm, the worker's numbers replace those of the agent's task: another version of jax may look for Slurm first,
and other programs read them too.

inherit: no variables of ours, but those of the MPI launcher that started this agent (`task_variables`).

tf: `TF_CONFIG`, for TensorFlow's `TFConfigClusterResolver` and the multi-worker strategies.

It names every worker, so each node needs every other node's record: n times n reads in a round of n nodes.

Ports reserved for the workers of a round: chosen by the kernel and bound here, but never listened on here.

A worker can still bind them: gRPC, with which jax and TensorFlow listen, shares its port with sockets of the same user
(SO_REUSEPORT, SO_REUSEADDR), and so do our sockets. No other process can get the port: the kernel does not use it for
outgoing connections, and refuses it to sockets without sharing.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.options import checked_frameworks
from rallypoint.base.devices import best, seen
from rallypoint.base.endpoint import Endpoint
from rallypoint.features.round_setup import PeerRecord, PeerUser, RoundInSetup, exchange_of

if TYPE_CHECKING:
    from rallypoint.agent.spec import VariableSource, Worker, WorkerGroup


class WorkerPlace(NamedTuple):
    """One worker in its round.

    `local_rank` is as the worker sees it: 0 for each worker with virtual local ranks; `gpus` is then 1.

    Args:
        rank: the rank among all workers of the round.
        world_size: the number of workers in the round.
        local_rank: the rank on its node.
        local_world_size: the number of workers on its node.
        records: the nodes' records that its kinds require, by group rank.
        inherited: the agent's environment.
        gpus: the number of GPUs that the node's workers see; 0 if unknown.
        shares_gpus: whether the node's workers divide these GPUs.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    records: Mapping[int, PeerRecord]
    inherited: Mapping[str, str]
    gpus: int
    shares_gpus: bool


class Kind(NamedTuple):
    """The variables of one framework.

    Args:
        names: the names of all its variables.
        variables: returns the variables of one worker.
        ports: returns how many ports a node needs, from its group rank and number of workers.
        wanted: returns the nodes whose records are needed, from the number of nodes.
    """

    names: frozenset[str]
    variables: Callable[[WorkerPlace], Mapping[str, str]]
    ports: Callable[[int, int], int] | None = None
    wanted: Callable[[int], Collection[int]] | None = None


# Open MPI: for programs that read ranks from its variables without starting MPI


COMM_RANKS: Mapping[str, Callable[[WorkerPlace], int]] = {
    "OMPI_COMM_WORLD_RANK": lambda place: place.rank,
    "OMPI_COMM_WORLD_SIZE": lambda place: place.world_size,
    "OMPI_COMM_WORLD_LOCAL_RANK": lambda place: place.local_rank,
}

_OMPI_VARIABLES: Mapping[str, Callable[[WorkerPlace], int]] = {
    **COMM_RANKS,
    "OMPI_COMM_WORLD_LOCAL_SIZE": lambda place: place.local_world_size,
    "OMPI_COMM_WORLD_NODE_RANK": lambda place: place.local_rank,  # counts the processes of all jobs on the node
    "OMPI_UNIVERSE_SIZE": lambda place: place.world_size,
}

_OMPI_KIND = Kind(
    frozenset(_OMPI_VARIABLES),
    lambda place: {name: str(number(place)) for name, number in _OMPI_VARIABLES.items()},
)


# jax


_JAX = "jax"

_OF_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS")
_LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"


def _jax_variables(place: WorkerPlace) -> Mapping[str, str]:
    """The coordinator is the worker with rank 0, at its node's reserved port."""
    host = place.records[0]
    coordinator = Endpoint(host.address, host.ports[_JAX][0])
    found = {
        "JAX_COORDINATOR_ADDRESS": str(coordinator),
        "JAX_COORDINATOR_PORT": str(coordinator.port),
        "JAX_NUM_PROCESSES": str(place.world_size),
        "JAX_PROCESS_ID": str(place.rank),
        "OMPI_MCA_orte_hnp_uri": f"0.0;{_uri(coordinator)}",
        **{name: str(number(place)) for name, number in COMM_RANKS.items()},
    }
    devices = _local_devices(place)
    if devices and _LOCAL_DEVICES not in place.inherited:
        found[_LOCAL_DEVICES] = devices
    numbers = (place.rank, place.local_rank, place.world_size, place.world_size)
    found.update({name: str(of) for name, of in zip(_OF_SLURM, numbers, strict=True) if name in place.inherited})
    return found


def _local_devices(place: WorkerPlace) -> str:
    """This worker's equal share of the GPUs. Empty to let jax choose one GPU by local rank.

    Without this variable, the only worker on a node with several GPUs would see only the first.
    """
    workers = place.local_world_size if place.shares_gpus else 1
    share = place.gpus // workers
    first = share * place.local_rank
    return ",".join(map(str, range(first, first + share)))


def _uri(endpoint: Endpoint) -> str:
    return f"tcp6://[{endpoint.host}]:{endpoint.port}" if ":" in endpoint.host else f"tcp://{endpoint}"


_JAX_KIND = Kind(
    frozenset(
        (
            *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
            *(_LOCAL_DEVICES, "OMPI_MCA_orte_hnp_uri", *COMM_RANKS, *_OF_SLURM),
        )
    ),
    _jax_variables,
    ports=lambda group_rank, _workers: 1 if group_rank == 0 else 0,
    wanted=lambda _nodes: (0,),
)


# TensorFlow


_TENSORFLOW = "tf"


def _tensorflow_variables(place: WorkerPlace) -> Mapping[str, str]:
    """Make all workers tasks of the job `worker`, with the first as the chief; the index is the rank."""
    records = sorted(place.records.values(), key=lambda record: record.base_rank)
    workers = [str(Endpoint(record.address, port)) for record in records for port in record.ports[_TENSORFLOW]]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}}
    return {"TF_CONFIG": json.dumps(config)}


_TENSORFLOW_KIND = Kind(
    frozenset({"TF_CONFIG"}),
    _tensorflow_variables,
    ports=lambda _group_rank, workers: workers,
    wanted=range,
)


# The MPI launcher's variables of this agent: `task_variables` removes them, unless this kind is requested.

_INHERITED_KIND = Kind(frozenset(), lambda _place: {})


# The table


KINDS: Mapping[str, Kind] = {
    _JAX: _JAX_KIND,
    _TENSORFLOW: _TENSORFLOW_KIND,
    "ompi": _OMPI_KIND,
    "inherit": _INHERITED_KIND,
}
"""The kinds that add to torch's variables, which every worker gets."""


# The agent's side


class WorkerEnv(Feature):
    """Adds the requested kinds of variables to the workers of each round."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        names = checked_frameworks(self.workers.group.spec.features.frameworks.worker_env)
        self._kinds = [FrameworkVariables(name, KINDS[name], self.workers.group) for name in names]
        for kind in self._kinds:
            if kind.kind.wanted is not None:
                why = f"--worker-env={kind.use}"
                exchange_of(self.workers, self.workers.max_nodes, why).users.append(kind)

    def variables(self) -> Iterable[VariableSource]:
        return self._kinds


class FrameworkVariables(PeerUser):
    """Variables of one kind: a `PeerUser` and a `VariableSource`."""

    def __init__(self, name: str, kind: Kind, group: WorkerGroup) -> None:
        self.use = name
        self.kind = kind
        self.names = kind.names
        self._group = group
        self._reserved = ReservedPorts()
        self._records: Mapping[int, PeerRecord] = {}
        self._gpus = -1

    def reserve(self, round_: RoundInSetup) -> Sequence[int]:
        workers = round_.group.spec.local_world_size
        return self._reserved.reserve(self.kind.ports(round_.place.group_rank, workers) if self.kind.ports else 0)

    def wanted(self, round_: RoundInSetup) -> Collection[int]:
        return self.kind.wanted(round_.place.group_world_size) if self.kind.wanted else ()

    def take(self, round_: RoundInSetup) -> None:
        for record in round_.records.values():
            wanted = self.kind.ports(record.group_rank, record.local_world_size) if self.kind.ports else 0
            if len(record.ports.get(self.use, ())) < wanted:
                raise ValueError(
                    f"{record.node} reported no port for {self.use}; start all nodes with the same --worker-env"
                )
        self._records = round_.records

    def close(self) -> None:
        self._reserved.close()

    def variables(self, worker: Worker, environment: Mapping[str, str]) -> Mapping[str, str]:
        if self._gpus < 0:
            gpus = best(row for row in seen(os.environ) if row.vendor.kind == "cuda")
            self._gpus = len(gpus.devices) if gpus else 0
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


class ReservedPorts:
    """The ports for one use on one node, round by round."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve(self, count: int) -> tuple[int, ...]:
        """Reserve this many new ports, and release those of the previous round.

        Raises:
            OSError: not enough ports are free.
        """
        previous, self._sockets = self._sockets, []
        try:
            for _ in range(count):
                self._sockets.append(_bound())
        finally:
            for holder in previous:  # only now, so that no round gets a port of the previous one
                holder.close()
        return tuple(int(holder.getsockname()[1]) for holder in self._sockets)

    def close(self) -> None:
        """Release all. Idempotent."""
        self.reserve(0)


def _bound() -> socket.socket:
    """Bind a socket to a port on all addresses, over IPv6 and IPv4 or, without IPv6, over IPv4."""
    try:
        return _bind(socket.AF_INET6, "::")
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _bind(socket.AF_INET, "")


def _bind(family: int, address: str) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, 0))
    except BaseException:
        made.close()
        raise
    return made
