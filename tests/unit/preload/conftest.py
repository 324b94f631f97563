"""The reaper that the tests of this folder start their workers by."""

from tests.unit.workers.conftest import reaper

__all__ = ["reaper"]
