"""The reaper that starts the workers in the tests of this folder."""

from tests.unit.workers.conftest import reaper

__all__ = ["reaper"]
