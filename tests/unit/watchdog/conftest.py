"""What the tests of this folder share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _records_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has set up our log in this process before: `caplog` listens at the root."""
    monkeypatch.setattr(logging.getLogger("rallypoint"), "propagate", True)
