"""Which processors each worker is bound to, so that it runs near its GPU (contract section 1.9). Pure.

Laws:

- worker i uses GPU i;
- a worker is bound only to processors that the agent itself may use, and to one at least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rallypoint.base.errors import UserError
from rallypoint.base.log import ranges

Cpus = frozenset[int]


class AffinityMode(str, Enum):  # noqa: UP042 - its `str` is torch's: with the name of the class
    """The processors that a worker shares with its GPU."""

    NODE = "node"
    """All processors of the GPU's NUMA node."""
    SOCKET = "socket"
    """All processors of the socket that the node is on."""
    EXCLUSIVE = "exclusive"
    """Whole cores of the node, which no other GPU's worker gets."""
    CORE_COMPLEX = "core-complex"
    """The processors behind one last-level cache of the node."""


@dataclass(frozen=True)
class NumaOptions:
    """The requested binding.

    Args:
        affinity_mode: what a worker shares with its GPU; one of `AffinityMode`, or its text.
        should_fall_back_if_binding_fails: whether workers run unbound if they cannot be bound.

    Raises:
        UserError: there is no such mode.
    """

    affinity_mode: AffinityMode | str
    should_fall_back_if_binding_fails: bool = False

    def __post_init__(self) -> None:
        try:
            AffinityMode(self.affinity_mode)
        except ValueError:
            modes = ", ".join(AffinityMode)
            raise UserError(f"there is no affinity mode {self.affinity_mode!r}; choose one of {modes}") from None

    @property
    def mode(self) -> AffinityMode:
        """`affinity_mode` as an `AffinityMode`."""
        return AffinityMode(self.affinity_mode)


class Topology(NamedTuple):
    """The machine's topology. Only what the mode needs is filled in.

    `nodes`: NUMA node to its processors. `gpu_nodes`: the NUMA node of each GPU. `packages`: NUMA node to its socket.
    `cores`, `caches`: processor to those on the same core, and behind the same last-level cache.
    """

    nodes: Mapping[int, Cpus]
    gpu_nodes: Sequence[int]
    packages: Mapping[int, int] = {}
    cores: Mapping[int, Cpus] = {}
    caches: Mapping[int, Cpus] = {}


def bindings(mode: AffinityMode, topology: Topology, allowed: Cpus, workers: int) -> list[Cpus]:
    """The processors of each worker, by local rank, out of those `allowed` to the agent.

    Raises:
        UserError: there are fewer GPUs than workers, or one would have no processor.
    """
    if workers > len(topology.gpu_nodes):
        raise UserError(
            f"{workers} workers cannot each be bound near a GPU of its own, since there are "
            f"{len(topology.gpu_nodes)} GPUs here"
        )
    return [_checked(gpu, _BY_MODE[mode](topology, allowed, gpu), topology) for gpu in range(workers)]


def _checked(gpu: int, cpus: Cpus, topology: Topology) -> Cpus:
    if not cpus:
        raise UserError(
            f"worker {gpu} would have no processor, since this process may use none of NUMA node "
            f"{topology.gpu_nodes[gpu]}, where its GPU is"
        )
    return cpus


def _of_node(topology: Topology, allowed: Cpus, gpu: int) -> Cpus:
    return topology.nodes.get(topology.gpu_nodes[gpu], frozenset()) & allowed


def _of_socket(topology: Topology, allowed: Cpus, gpu: int) -> Cpus:
    own = topology.packages.get(topology.gpu_nodes[gpu])
    near = [cpus for node, cpus in topology.nodes.items() if topology.packages.get(node) == own]
    return frozenset().union(*near) & allowed


def _exclusive(topology: Topology, allowed: Cpus, gpu: int) -> Cpus:
    cores = _groups(_of_node(topology, allowed, gpu), topology.cores)
    position, sharers = _gpu_position(topology, gpu)
    if len(cores) < sharers:
        raise UserError(
            f"NUMA node {topology.gpu_nodes[gpu]} has {len(cores)} cores that this process may use, which cannot be "
            f"shared out among its {sharers} GPUs"
        )
    each, more = divmod(len(cores), sharers)
    begin = position * each + min(position, more)
    return frozenset().union(*cores[begin : begin + each + (position < more)])


def _of_cache(topology: Topology, allowed: Cpus, gpu: int) -> Cpus:
    groups = _groups(_of_node(topology, allowed, gpu), topology.caches)
    groups.sort(key=lambda cpus: (-len(cpus), min(cpus)))
    return groups[_gpu_position(topology, gpu)[0] % len(groups)] if groups else frozenset()


_BY_MODE: dict[AffinityMode, Callable[[Topology, Cpus, int], Cpus]] = {
    AffinityMode.NODE: _of_node,
    AffinityMode.SOCKET: _of_socket,
    AffinityMode.EXCLUSIVE: _exclusive,
    AffinityMode.CORE_COMPLEX: _of_cache,
}


def _gpu_position(topology: Topology, gpu: int) -> tuple[int, int]:
    """The position of a GPU among those of its NUMA node, and their number."""
    node = topology.gpu_nodes[gpu]
    on_node = [number for number, each in enumerate(topology.gpu_nodes) if each == node]
    return on_node.index(gpu), len(on_node)


def _groups(cpus: Cpus, sharing: Mapping[int, Cpus]) -> list[Cpus]:
    """`cpus` by what they share; a processor that shares nothing is a group. Sorted by lowest processor."""
    found = {cpu: sharing.get(cpu, frozenset((cpu,))) & cpus | {cpu} for cpu in cpus}
    return sorted(set(found.values()), key=min)


def parse_cpus(text: str) -> Cpus:
    """Read a list of the kernel's: `0-3,8`. Raises ValueError if it is not one."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Cpus) -> str:
    """Write such a list, for people."""
    return ",".join(ranges(cpus))
