"""The launcher of `tests/jobs`, for commands that run as the files of `deploy/` have them run."""

from __future__ import annotations

from tests.jobs.conftest import rallyrun

__all__ = ["rallyrun"]
