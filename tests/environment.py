"""The environment of commands under test."""

from __future__ import annotations

import os

_STEERING = (
    *("PET_", "RALLYPOINT", "TORCH", "LOGLEVEL", "OMP_", "PYTHON_EXEC", "SLURM_"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT"),
    *("MASTER_", "RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "LOCAL_"),
)


JOBS = "RALLYPOINT_JOBS_DIR"
"""Names the folder in which commands look for local jobs: those of tests are not among the user's."""


def undisturbed(*also: str) -> dict[str, str]:
    """Ours without what steers launchers and workers, and without names that begin with one of these."""
    steering = (*_STEERING, *also)
    return {name: text for name, text in os.environ.items() if name == JOBS or not name.startswith(steering)}
