"""The variables that Open MPI's mpirun sets, for programs that read ranks there and do not start MPI. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rallypoint.agent.preparations.worker_env.place import Kind, WorkerPlace

COMM_RANKS: Mapping[str, Callable[[WorkerPlace], int]] = {
    "OMPI_COMM_WORLD_RANK": lambda place: place.rank,
    "OMPI_COMM_WORLD_SIZE": lambda place: place.world_size,
    "OMPI_COMM_WORLD_LOCAL_RANK": lambda place: place.local_rank,
}

_VARIABLES: Mapping[str, Callable[[WorkerPlace], int]] = {
    **COMM_RANKS,
    "OMPI_COMM_WORLD_LOCAL_SIZE": lambda place: place.local_world_size,
    "OMPI_COMM_WORLD_NODE_RANK": lambda place: place.local_rank,  # among the processes of all jobs on the node
    "OMPI_UNIVERSE_SIZE": lambda place: place.world_size,
}

KIND = Kind(
    frozenset(_VARIABLES),
    lambda place: {name: str(number(place)) for name, number in _VARIABLES.items()},
)
