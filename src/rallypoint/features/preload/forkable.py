"""Decides which workers can be forked from a zygote. Pure, except for a look at the program and the script.

The command must be `python [flags] script [arguments]`, or `-m module` instead of the script.

Two kinds of a worker's variables must have the zygote's values:

- variables that the imports read through `os.environ`, which the zygote records by name, set or not; a loop over all
variables reads all that the zygote has;
- variables that the interpreter, the loader and C libraries read, which cannot be recorded: `UNTRACKED_READS`.

`RANK`, `LOCAL_RANK` and the like differ between workers, and matter only if an import read them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

_FLAGS = frozenset("bBdOPqsuvR")
"""An interpreter's flags without a value that permit forking."""
_FLAGS_WITH_VALUE = frozenset("WX")
_REFUSED = {
    "c": "-c runs a command, but only scripts and modules can be forked",
    "E": "-E makes the interpreter ignore PYTHONPATH, which a zygote needs",
    "I": "-I makes the interpreter ignore PYTHONPATH, which a zygote needs",
    "S": "-S leaves out `site`, which a zygote needs",
}


class NotForkable(Exception):
    """The reason why workers start without preloading, as text.

    Args:
        text: the reason.
        about: its subject, if it is logged only once even with a different text.
    """

    def __init__(self, text: str, about: str = "") -> None:
        super().__init__(text)
        self.about = about or text


class NeverForkable(NotForkable):
    """The reason why this worker, and others like it, can never be forked from the zygote."""


class PreloadCommand(NamedTuple):
    """The common part of the commands of all workers: the interpreter with its flags, and `-m` or a script."""

    interpreter: tuple[str, ...]
    is_module: bool
    target: str
    length: int
    """Number of its words; the rest belong to the script."""

    @property
    def path0(self) -> str:
        """Entry that the interpreter puts first on `sys.path` for this command."""
        if self.is_module:
            return os.getcwd()
        if os.path.isdir(self.target) or self.target.endswith((".zip", ".pyz")):
            return self.target
        return os.path.dirname(os.path.realpath(self.target))

    @property
    def main_file(self) -> str | None:
        """Future value of `__main__.__file__`, if known before it runs."""
        return None if self.is_module or os.path.isdir(self.target) else os.path.join(os.getcwd(), self.target)


def parse_command(argv: Sequence[str]) -> PreloadCommand:
    """Split a command into its parts.

    Raises:
        NotForkable: the command's workers cannot be forked.
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        for place, letter in enumerate(argv[at][1:], 1):
            rest = argv[at][place + 1 :]
            if letter == "m":
                target = rest or "".join(argv[at + 1 : at + 2])
                flags = (f"-{argv[at][1:place]}",) if place > 1 else ()
                return _checked(PreloadCommand((*argv[:at], *flags), True, target, at + (1 if rest else 2)))
            if letter in _FLAGS_WITH_VALUE:
                at += not rest
                break
            if letter not in _FLAGS:
                raise NotForkable(_REFUSED.get(letter, f"{argv[at]} is an interpreter flag that forks cannot have"))
        at += 1
    if at >= len(argv) or argv[at] == "-":
        raise NotForkable("the interpreter's command contains no script")
    return _checked(PreloadCommand(tuple(argv[:at]), False, argv[at], at + 1))


def _checked(command: PreloadCommand) -> PreloadCommand:
    if not command.target:
        raise NotForkable("the interpreter's command contains no module")
    if not command.is_module and not os.path.exists(command.target):
        raise NotForkable(f"the script {command.target!r} does not exist")
    program = command.interpreter[0]
    if not _is_interpreter(program):
        raise NotForkable(
            f"{program!r} is not itself a Python interpreter, so it is unknown what it would do with a zygote"
        )
    return command


def _is_interpreter(program: str) -> bool:
    """Whether this is an interpreter itself: a wrapper might change the environment that a zygote needs."""
    folders = [""] if os.path.dirname(program) else os.get_exec_path()
    path = next(
        (candidate for candidate in (os.path.join(folder, program) for folder in folders) if os.path.isfile(candidate)),
        "",
    )
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                return False
        return os.path.basename(path).startswith("python") or os.path.samefile(path, sys.executable)
    except OSError:
        return False


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
"""Name prefixes, with the library that reads these variables unrecorded."""

_READ_LATER = frozenset(
    (
        *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        *("JAX_LOCAL_DEVICE_IDS", "TF_CONFIG", "NCCL_SOCKET_IFNAME"),
        *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_WORKER_SERVER_SOCKET"),
    )
)
"""Names among these that no import reads. A process's position among others is read when it connects to them, by jax
and TensorFlow through `os.environ`, and by NCCL with the first communicator. torch reads the settings of flight
recorders' dumps with a process group, a dump or its worker server.
"""


class VariableDifference(NamedTuple):
    """A variable that matters and differs."""

    name: str
    text: str
    """A description, with its values."""


def first_difference(
    zygote: Mapping[str, str], worker: Mapping[str, str], read: Mapping[str, str]
) -> VariableDifference | None:
    """The first variable that matters and differs; None if there is none.

    Args:
        zygote: the environment that the imports saw.
        worker: the environment of the worker.
        read: names that the imports have read, set or not, with the file and line.
    """
    for name in sorted({*zygote, *worker}):
        if zygote.get(name) == worker.get(name):
            continue
        reader = read.get(name) or _untracked_reader(name)
        if reader:
            values = _shown_value(worker, name), _shown_value(zygote, name)
            text = f"{reader} reads {name}, which is {values[0]} in the worker and was {values[1]} during the imports"
            return VariableDifference(name, text)
    return None


def untracked_read(names: Iterable[str]) -> str | None:
    """A text about the first of these variables with an unrecorded reader; None if there is none."""
    return next((f"{who} reads {name}" for name in sorted(names) if (who := _untracked_reader(name))), None)


def affinity_conflict(zygote: Collection[int], worker: Collection[int], environ: Mapping[str, str]) -> str | None:
    """Why a worker bound to some processors cannot use imports set up for all processors; None if it can. OpenMP and
    BLAS count processors when loaded if nothing else sets the number of threads.

    Args:
        zygote: the processors that the imports saw.
        worker: those of the worker; empty for all.
        environ: the worker's environment.
    """
    if not worker or set(worker) == set(zygote):
        return None
    beginning = "a worker that is bound to processors would use the number of threads that the imports found"
    for name in _AFFINITY_VARIABLES:
        if environ.get(name):
            return f"{beginning}, but {name} bound those to the processors of all workers"
    if not environ.get("OMP_NUM_THREADS"):
        return f"{beginning}, because OMP_NUM_THREADS is not set; set it"
    return None


_AFFINITY_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _untracked_reader(name: str) -> str:
    if name in _READ_LATER:
        return ""
    return next((who for beginning, who in UNTRACKED_READS.items() if name.startswith(beginning)), "")


def _shown_value(environ: Mapping[str, str], name: str) -> str:
    return repr(environ[name]) if name in environ else "not set"
