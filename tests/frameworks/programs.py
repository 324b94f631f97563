"""The programs of `examples/frameworks`: what each needs, and in which environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
ENVIRONMENT = ROOT / ".venv-frameworks"
"""What `make test` and `make frameworks` set up; torch is that of `.venv`."""
COMPILED = ENVIRONMENT / "torch-extensions"
"""Where torch finds what DeepSpeed has compiled."""
VARIABLES = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(COMPILED), "HF_HUB_OFFLINE": "1"}
"""What the packages of that environment are told."""


class Program(NamedTuple):
    """One folder of `examples/frameworks`."""

    name: str
    package: str
    """What it imports that may be missing."""
    preload: str = "torch"
    """What `make frameworks` has imported ahead."""
    flags: tuple[str, ...] = ()
    saves_before_stop: bool = True
    compiled: str = ""
    """A file that `make` has had compiled into the environment of frameworks, without which it cannot run."""
    node_killed: bool = False
    """Whether `make test` kills a whole node of it; `make frameworks` does of all."""

    @property
    def script(self) -> Path:
        """What is launched."""
        return EXAMPLES / self.name / "train.py"

    def python(self) -> str | None:
        """The interpreter that has the package: our own, or that of the environment of frameworks."""
        if self.compiled and not any(COMPILED.glob(f"**/{self.compiled}")):
            return None
        if importlib.util.find_spec(self.package) is not None:
            return sys.executable
        if any(ENVIRONMENT.glob(f"lib/python*/site-packages/{self.package}/__init__.py")):
            return str(ENVIRONMENT / "bin" / "python")
        return None


PROGRAMS = (
    Program("accelerate", "accelerate"),
    Program("deepspeed", "deepspeed", compiled="deepspeed_shm_comm.so"),
    Program("huggingface_trainer", "transformers"),
    Program("ignite", "ignite", saves_before_stop=False),
    Program("jax", "jax", "jax", ("--worker-env=jax",), node_killed=True),
    Program("lightning", "lightning"),
    Program("nanogpt", "torch", saves_before_stop=False),
    Program("pytorch_ddp", "torch", node_killed=True),
    Program("pytorch_fsdp", "torch"),
)


def why_not(name: str) -> str | None:
    """Why a program cannot run here."""
    (program,) = (each for each in PROGRAMS if each.name == name)
    needs = f"examples/frameworks/{name}/requirements.txt"
    return f"{program.package} is not installed ({needs})" if program.python() is None else None
