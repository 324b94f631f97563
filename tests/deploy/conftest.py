"""The launcher of `tests/jobs`, for commands that run like the files of `deploy/`."""

from __future__ import annotations

from tests.jobs.conftest import rallyrun

__all__ = ["rallyrun"]
