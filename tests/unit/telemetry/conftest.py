"""Event handlers of a test are removed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rallypoint.observe.telemetry.handlers import log_handlers


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = dict(log_handlers)
    yield
    log_handlers.clear()
    log_handlers.update(before)
