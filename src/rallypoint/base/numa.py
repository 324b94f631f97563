"""Binds each worker to processors near its GPU (contract section 1.9). `worker_cpus` reads the machine's topology from
/sys. `bindings` decides; it is pure.

Laws:

- worker i uses GPU i;
- a worker is bound to at least one processor, and only to those that the agent may use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from rallypoint.base.devices import best, seen, trouble_of
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger, ranges

_log = get_logger(__name__)

Cpus = frozenset[int]


class AffinityMode(str, Enum):  # noqa: UP042 - its `str` is torch's: with the name of the class
    """Which processors a worker shares with its GPU."""

    NODE = "node"
    """All processors of the GPU's NUMA node."""
    SOCKET = "socket"
    """All processors of the socket that the node is on."""
    EXCLUSIVE = "exclusive"
    """Whole cores of the node, not shared with workers of other GPUs."""
    CORE_COMPLEX = "core-complex"
    """The processors behind one last-level cache of the node."""


@dataclass(frozen=True)
class NumaOptions:
    """The requested binding.

    Args:
        affinity_mode: the processors that a worker shares with its GPU: an `AffinityMode` or its text.
        should_fall_back_if_binding_fails: whether workers that cannot be bound run unbound.

    Raises:
        UserError: no such mode exists.
    """

    affinity_mode: AffinityMode | str
    should_fall_back_if_binding_fails: bool = False

    def __post_init__(self) -> None:
        try:
            AffinityMode(self.affinity_mode)
        except ValueError:
            modes = ", ".join(AffinityMode)
            raise UserError(f"unknown affinity mode {self.affinity_mode!r}; choose one of {modes}") from None

    @property
    def mode(self) -> AffinityMode:
        return AffinityMode(self.affinity_mode)


class CpuTopology(NamedTuple):
    """The part of the machine's topology that the mode needs.

    `nodes` maps a NUMA node to its processors, `packages` to its socket. `gpu_nodes` lists the NUMA node of each GPU.
    `cores` and `caches` map a processor to those on the same core, or behind the same last-level cache.
    """

    nodes: Mapping[int, Cpus]
    gpu_nodes: Sequence[int]
    packages: Mapping[int, int] = {}
    cores: Mapping[int, Cpus] = {}
    caches: Mapping[int, Cpus] = {}


def bindings(mode: AffinityMode, topology: CpuTopology, allowed: Cpus, workers: int) -> list[Cpus]:
    """The processors for each worker, by local rank, from those `allowed` for the agent.

    Raises:
        UserError: fewer GPUs than workers exist, or a worker would have no processor.
    """
    if workers > len(topology.gpu_nodes):
        raise UserError(
            f"{workers} workers cannot each be bound near their own GPU: this machine has {len(topology.gpu_nodes)} "
            "GPUs; start fewer workers, or remove --numa-binding"
        )
    return [_checked(gpu, _BY_MODE[mode](topology, allowed, gpu), topology) for gpu in range(workers)]


def _checked(gpu: int, cpus: Cpus, topology: CpuTopology) -> Cpus:
    if not cpus:
        raise UserError(
            f"worker {gpu} would have no processors: its GPU is on NUMA node {topology.gpu_nodes[gpu]}, but this "
            "process may not use any processors on that node; request processors near the GPUs, or remove "
            "--numa-binding"
        )
    return cpus


def _of_node(topology: CpuTopology, allowed: Cpus, gpu: int) -> Cpus:
    return topology.nodes.get(topology.gpu_nodes[gpu], frozenset()) & allowed


def _of_socket(topology: CpuTopology, allowed: Cpus, gpu: int) -> Cpus:
    own = topology.packages.get(topology.gpu_nodes[gpu])
    near = [cpus for node, cpus in topology.nodes.items() if topology.packages.get(node) == own]
    return frozenset().union(*near) & allowed


def _exclusive(topology: CpuTopology, allowed: Cpus, gpu: int) -> Cpus:
    cores = _groups(_of_node(topology, allowed, gpu), topology.cores)
    position, sharers = _gpu_position(topology, gpu)
    if len(cores) < sharers:
        raise UserError(
            f"NUMA node {topology.gpu_nodes[gpu]} has {len(cores)} cores that this process may use, too few for its "
            f"{sharers} GPUs; use --numa-binding=node, or remove the flag"
        )
    share, more = divmod(len(cores), sharers)
    begin = position * share + min(position, more)
    return frozenset().union(*cores[begin : begin + share + (position < more)])


def _of_cache(topology: CpuTopology, allowed: Cpus, gpu: int) -> Cpus:
    groups = _groups(_of_node(topology, allowed, gpu), topology.caches)
    groups.sort(key=lambda cpus: (-len(cpus), min(cpus)))
    return groups[_gpu_position(topology, gpu)[0] % len(groups)] if groups else frozenset()


_BY_MODE: dict[AffinityMode, Callable[[CpuTopology, Cpus, int], Cpus]] = {
    AffinityMode.NODE: _of_node,
    AffinityMode.SOCKET: _of_socket,
    AffinityMode.EXCLUSIVE: _exclusive,
    AffinityMode.CORE_COMPLEX: _of_cache,
}


def _gpu_position(topology: CpuTopology, gpu: int) -> tuple[int, int]:
    """The position of a GPU among the GPUs of its NUMA node, and how many the node has."""
    node = topology.gpu_nodes[gpu]
    on_node = [number for number, gpu_node in enumerate(topology.gpu_nodes) if gpu_node == node]
    return on_node.index(gpu), len(on_node)


def _groups(cpus: Cpus, sharing: Mapping[int, Cpus]) -> list[Cpus]:
    by_cpu = {cpu: sharing.get(cpu, frozenset((cpu,))) & cpus | {cpu} for cpu in cpus}
    return sorted(set(by_cpu.values()), key=min)


def parse_cpus(text: str) -> Cpus:
    """Parse a kernel's list: `0-3,8`. Raises ValueError if it is malformed."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Cpus) -> str:
    """Format processors for messages, like the kernel's lists."""
    return ",".join(ranges(cpus))


def worker_cpus(
    options: NumaOptions, workers: int, environ: Mapping[str, str], root: Path = Path("/")
) -> list[Cpus] | None:
    """The processors for each of this node's `workers` workers, by local rank; None if they run unbound.

    `environ` is the agent's environment, which selects the GPUs; `root` is the folder with `sys`, `proc` and `dev`.

    Raises:
        UserError: workers cannot be bound, and `options` does not allow this.
    """
    try:
        gpus = _addresses(environ, root)
        topology = read_topology(options.mode, gpus, root)
        bound = bindings(options.mode, topology, frozenset(os.sched_getaffinity(0)), workers)
    except UserError as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        _log.warning("workers are not bound near their GPUs (%s): %s", options.mode, error)
        return None
    for rank, cpus in enumerate(bound):
        _log.info("local rank %d runs on processors %s (%s)", rank, format_cpus(cpus), options.mode)
    return bound


def read_topology(mode: AffinityMode, gpus: Sequence[str], root: Path = Path("/")) -> CpuTopology:
    """Read the part of the topology that `mode` needs; `gpus` are PCI addresses. Raises UserError if the kernel does
    not show it.
    """
    cpu_folder = root / "sys/devices/system/cpu"
    devices = [root / "sys/bus/pci/devices" / address for address in gpus]
    gpu_nodes = [max(0, int(_text(device / "numa_node"))) for device in devices]  # -1 on machines with one node
    nodes = {int(path.parent.name[4:]): _cpus(path) for path in root.glob("sys/devices/system/node/node[0-9]*/cpulist")}
    if not nodes:  # a kernel without NUMA
        nodes = {0: _cpus(cpu_folder / "online")}
    near = frozenset().union(*(nodes.get(node, frozenset()) for node in gpu_nodes))
    if mode is AffinityMode.SOCKET:
        return CpuTopology(nodes, gpu_nodes, packages=_packages(cpu_folder, nodes))
    if mode is AffinityMode.EXCLUSIVE:
        cores = {cpu: _cpus(cpu_folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in near}
        return CpuTopology(nodes, gpu_nodes, cores=cores)
    if mode is AffinityMode.CORE_COMPLEX:
        return CpuTopology(
            nodes, gpu_nodes, caches={cpu: _behind_cache(cpu_folder / f"cpu{cpu}/cache") for cpu in near}
        )
    return CpuTopology(nodes, gpu_nodes)


def bind_this_process(cpus: Cpus) -> None:
    """Bind every thread of this process that has the same affinity as the main thread.

    Raises:
        OSError: this process may use none of these processors.
    """
    before = os.sched_getaffinity(os.getpid())
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(int(name)) == before:
                os.sched_setaffinity(int(name), cpus)


def _addresses(environ: Mapping[str, str], root: Path) -> list[str]:
    rows = seen(environ, root)
    row = best(rows)
    if row is None:
        hidden = [f"{row.variable}={environ[row.variable]!r}" for row in rows if row.variable]
        why = trouble_of(rows, root)[0] or f"this machine has none{f' with {hidden[0]}' if hidden else ''}"
        raise UserError(f"workers cannot be bound near an accelerator: {why}; remove --numa-binding")
    if not all(device.address for device in row.devices):
        by = f" with {row.variable}={environ[row.variable]!r}" if row.variable else ""
        raise UserError(
            f"the driver does not report the PCI addresses of the {row.vendor.devices}{by}; remove --numa-binding"
        )
    return [device.address for device in row.devices]


def _packages(cpu_folder: Path, nodes: Mapping[int, Cpus]) -> dict[int, int]:
    return {
        node: int(_text(cpu_folder / f"cpu{min(cpus)}/topology/physical_package_id"))
        for node, cpus in nodes.items()
        if cpus
    }


def _behind_cache(folder: Path) -> Cpus:
    """The processors that share a processor's last-level data cache; empty if the kernel shows no cache."""
    caches = [
        (int(_text(index / "level")), _cpus(index / "shared_cpu_list"))
        for index in sorted(folder.glob("index[0-9]*"))
        if _text(index / "type") in {"Data", "Unified"}
    ]
    return max(caches, key=lambda cache: cache[0])[1] if caches else frozenset()


def _cpus(path: Path) -> Cpus:
    return parse_cpus(_text(path))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UserError(
            f"cannot read this machine's NUMA topology from {path} ({error.strerror}); mount /sys, or remove "
            "--numa-binding"
        ) from None
