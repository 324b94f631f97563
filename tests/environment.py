"""The environment of commands under test."""

from __future__ import annotations

import os

_STEERING = (
    *("PET_", "RALLYPOINT", "TORCH", "LOGLEVEL", "OMP_", "PYTHON_EXEC", "SLURM_"),
    *("MASTER_", "RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "LOCAL_"),
)


def undisturbed(*also: str) -> dict[str, str]:
    """Ours without what steers launchers and workers, and without names that begin with one of these."""
    return {name: text for name, text in os.environ.items() if not name.startswith((*_STEERING, *also))}
