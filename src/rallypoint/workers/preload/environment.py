"""Which variables must be the same for a worker as for the zygote. Pure.

Two kinds matter, and all others do not:

- those that the imports have read through `os.environ`, which the zygote records: by name, set or not, and by prefixes
  of names (`loop_filters`);
- those that the interpreter, the loader and C libraries read themselves, which cannot be recorded: the table below.

`RANK`, `LOCAL_RANK` and the like differ from worker to worker and matter only if an import has read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

UNTRACKED_READS = {
    "PYTHON": "the interpreter",
    "LD_": "the loader",
    "GLIBC_": "the C library",
    "MALLOC_": "the C library",
    "LANG": "the C library",
    "LC_": "the C library",
    "TZ": "the C library",
    "OMP_": "OpenMP",
    "GOMP_": "OpenMP",
    "KMP_": "OpenMP",
    "MKL_": "MKL",
    "DNNL_": "oneDNN",
    "ONEDNN_": "oneDNN",
    "OPENBLAS_": "OpenBLAS",
    "GOTO_": "OpenBLAS",
    "BLIS_": "BLIS",
    "TBB_": "TBB",
    "NPY_": "numpy",
    "CUDA_": "CUDA",
    "CUBLAS_": "CUDA",
    "CUDNN_": "CUDA",
    "NVIDIA_": "CUDA",
    "NVTE_": "CUDA",
    "NCCL_": "NCCL",
    "HIP_": "ROCm",
    "ROCR_": "ROCm",
    "HSA_": "ROCm",
    "MIOPEN_": "ROCm",
    "ZE_": "oneAPI",
    "ONEAPI_": "oneAPI",
    "SYCL_": "oneAPI",
    "TORCH_": "torch",
    "PYTORCH_": "torch",
    "ATEN_": "torch",
    "KINETO_": "torch",
    "TPU_": "XLA",
    "XLA_": "XLA",
    "JAX_": "JAX",
    "TF_": "TensorFlow",
}
"""Prefixes of names, and which library reads such variables without being seen."""

_READ_LATER = frozenset(
    (
        *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        *("JAX_LOCAL_DEVICE_IDS", "TF_CONFIG", "NCCL_SOCKET_IFNAME"),
        *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_WORKER_SERVER_SOCKET"),
    )
)
"""Names among these that no import reads: the position of a process among others is read when it connects to them, by
jax and TensorFlow through `os.environ` as well, and by NCCL when the first communicator is made. The settings of its
flight recorders' dumps torch reads with a process group, a dump or its worker server.
"""


class VariableDifference(NamedTuple):
    """A variable that matters and differs."""

    name: str
    text: str
    """A description, with its values."""


def first_difference(
    zygote: Mapping[str, str], worker: Mapping[str, str], read: Mapping[str, str], beginnings: Mapping[str, str]
) -> VariableDifference | None:
    """The first variable that matters and differs; None if there is none.

    Args:
        zygote: the environment that the imports saw.
        worker: the environment of the worker.
        read: names that the imports have read, there or not, with the file and line that did.
        beginnings: prefixes of names, all of which the imports have read, likewise.
    """
    for name in sorted({*zygote, *worker}):
        if zygote.get(name) == worker.get(name):
            continue
        reader = read.get(name) or _by_beginning(name, beginnings) or _untracked_reader(name)
        if reader:
            text = (
                f"{reader} reads {name}, which is {_shown_value(worker, name)} in the worker "
                f"and was {_shown_value(zygote, name)} "
                "during the imports"
            )
            return VariableDifference(name, text)
    return None


def untracked_read(names: Iterable[str]) -> str | None:
    """A text about the first of these variables that something reads without being seen; None if there is none."""
    return next((f"{who} reads {name}" for name in sorted(names) if (who := _untracked_reader(name))), None)


def affinity_conflict(zygote: Collection[int], worker: Collection[int], environ: Mapping[str, str]) -> str | None:
    """Why a worker bound to some processors cannot use what imports have set up for all, as text; None if it can.
    OpenMP and BLAS count processors when they are loaded, if nothing else sets the number of threads.

    Args:
        zygote: the processors that the imports saw.
        worker: those of the worker; empty for all.
        environ: the worker's environment.
    """
    if not worker or set(worker) == set(zygote):
        return None
    beginning = "a worker that is bound to processors takes its threads from what the imports found"
    for name in _AFFINITY_VARIABLES:
        if environ.get(name):
            return f"{beginning}, and {name} has bound these to processors of all"
    if not environ.get("OMP_NUM_THREADS"):
        return f"{beginning}, and no OMP_NUM_THREADS says how many; set it"
    return None


_AFFINITY_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _untracked_reader(name: str) -> str:
    return "" if name in _READ_LATER else _by_beginning(name, UNTRACKED_READS)


def _by_beginning(name: str, readers: Mapping[str, str]) -> str:
    return next((who for beginning, who in readers.items() if name.startswith(beginning)), "")


def _shown_value(environ: Mapping[str, str], name: str) -> str:
    return repr(environ[name]) if name in environ else "not set"
