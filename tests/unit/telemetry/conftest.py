"""Fixtures of the tests of telemetry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rallypoint.observe.telemetry.handlers import log_handlers


@pytest.fixture(autouse=True)
def _restored_handlers() -> Iterator[None]:
    """Remove the test's event handlers."""
    before = dict(log_handlers)
    yield
    log_handlers.clear()
    log_handlers.update(before)
