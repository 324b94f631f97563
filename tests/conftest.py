"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Speed is never tested: these machines are small, shared and noisy.
settings.register_profile("rallypoint", deadline=None)
settings.load_profile("rallypoint")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="write what the transcripts play to; review the difference"
    )
