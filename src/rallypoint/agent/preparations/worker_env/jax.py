"""The variables that `jax.distributed.initialize()` reads without arguments. Pure.

Of these variables jax itself reads the coordinator's address and the local devices only. It takes number and rank of
processes from the first cluster that it detects; the first one it looks for is that of Open MPI's mpirun, by the
variable `OMPI_MCA_orte_hnp_uri`. So a worker gets that and the three numbers which jax then reads. `JAX_NUM_PROCESSES`
and `JAX_PROCESS_ID` are for programs that pass them on themselves (Kubeflow Trainer sets the same).

Under Slurm, the numbers of the agent's task are replaced by the worker's: another version of jax may look there first,
and other programs read them too.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.agent.preparations.worker_env.ompi import COMM_RANKS
from rallypoint.agent.preparations.worker_env.place import Kind, WorkerPlace
from rallypoint.base.endpoint import Endpoint

USE = "jax"

_OF_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS")
_LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"


def variables(place: WorkerPlace) -> Mapping[str, str]:
    """See `Kind`. The coordinator is the worker of rank 0, at the port that its node has reserved."""
    host = place.records[0]
    coordinator = Endpoint(host.address, host.ports[USE][0])
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
    """The GPUs of this worker: an equal share each. Empty for jax's own choice: one by local rank.

    Without this, the only worker of a node with several GPUs would see the first alone.
    """
    workers = place.local_world_size if place.shares_gpus else 1
    share = place.gpus // workers
    first = share * place.local_rank
    return ",".join(map(str, range(first, first + share)))


def _uri(endpoint: Endpoint) -> str:
    return f"tcp6://[{endpoint.host}]:{endpoint.port}" if ":" in endpoint.host else f"tcp://{endpoint}"


KIND = Kind(
    frozenset(
        (
            *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
            *(_LOCAL_DEVICES, "OMPI_MCA_orte_hnp_uri", *COMM_RANKS, *_OF_SLURM),
        )
    ),
    variables,
    ports=lambda group_rank, _workers: 1 if group_rank == 0 else 0,
    wanted=lambda _nodes: (0,),
)
