"""Reads the machine's topology from /sys, and binds processes by it: the shell of `numa`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rallypoint.base.devices import VISIBLE, cuda_devices
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.numa import AffinityMode, Cpus, NumaOptions, Topology, bindings, format_cpus, parse_cpus

_log = get_logger(__name__)


def worker_cpus(
    options: NumaOptions, workers: int, environ: Mapping[str, str], root: Path = Path("/")
) -> list[Cpus] | None:
    """The processors of each of `workers` workers of this node, by local rank; None if they run unbound.

    `environ` is the agent's, which selects the GPUs; `root` is the folder of `sys`, `proc` and `dev`.

    Raises:
        UserError: they cannot be bound, and `options` do not allow that.
    """
    try:
        gpus = _addresses(environ, root)
        topology = read_topology(options.mode, gpus, root)
        found = bindings(options.mode, topology, frozenset(os.sched_getaffinity(0)), workers)
    except UserError as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        _log.warning("workers run on any processor, not near their GPUs (%s): %s", options.mode, error)
        return None
    for rank, cpus in enumerate(found):
        _log.info("worker %d runs on processors %s (%s)", rank, format_cpus(cpus), options.mode)
    return found


def read_topology(mode: AffinityMode, gpus: Sequence[str], root: Path = Path("/")) -> Topology:
    """The part of this machine's topology that `mode` needs; `gpus` are PCI addresses, `root` is the folder of `sys`.

    Raises:
        UserError: the kernel does not show it.
    """
    cpu_folder = root / "sys/devices/system/cpu"
    devices = [root / "sys/bus/pci/devices" / address for address in gpus]
    gpu_nodes = [max(0, int(_text(device / "numa_node"))) for device in devices]  # -1 on machines with one node
    nodes = {int(path.parent.name[4:]): _cpus(path) for path in root.glob("sys/devices/system/node/node[0-9]*/cpulist")}
    if not nodes:  # a kernel without NUMA
        nodes = {0: _cpus(cpu_folder / "online")}
    near = frozenset().union(*(nodes.get(node, frozenset()) for node in gpu_nodes))
    if mode is AffinityMode.SOCKET:
        return Topology(nodes, gpu_nodes, packages=_packages(cpu_folder, nodes))
    if mode is AffinityMode.EXCLUSIVE:
        cores = {cpu: _cpus(cpu_folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in near}
        return Topology(nodes, gpu_nodes, cores=cores)
    if mode is AffinityMode.CORE_COMPLEX:
        return Topology(nodes, gpu_nodes, caches={cpu: _behind_cache(cpu_folder / f"cpu{cpu}/cache") for cpu in near})
    return Topology(nodes, gpu_nodes)


def bind_this_process(cpus: Cpus) -> None:
    """Bind every thread of this process that is bound as the main thread is.

    Raises:
        OSError: none of these processors may be used.
    """
    before = os.sched_getaffinity(os.getpid())
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(int(name)) == before:
                os.sched_setaffinity(int(name), cpus)


def _addresses(environ: Mapping[str, str], root: Path) -> list[str]:
    gpus = cuda_devices(environ, root)
    seen = f" with {VISIBLE}={environ[VISIBLE]!r}" if VISIBLE in environ else ""
    if not gpus:
        raise UserError(f"workers are bound near their GPUs, and there is no NVIDIA GPU here{seen}")
    if not all(gpu.address for gpu in gpus):
        raise UserError(f"the driver does not show where the GPUs are on the PCI bus{seen}")
    return [gpu.address for gpu in gpus]


def _packages(cpu_folder: Path, nodes: Mapping[int, Cpus]) -> dict[int, int]:
    return {
        node: int(_text(cpu_folder / f"cpu{min(cpus)}/topology/physical_package_id"))
        for node, cpus in nodes.items()
        if cpus
    }


def _behind_cache(folder: Path) -> Cpus:
    """Processors that share the processor's last-level data cache; none if the kernel shows none."""
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
        raise UserError(f"the topology of this machine cannot be read: {path}: {error.strerror}") from None
