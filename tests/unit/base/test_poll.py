"""Sleeping for longer than the kernel's calls allow."""

from __future__ import annotations

import math
import os

import pytest

from rallypoint.base.kernel import until_readable


@pytest.mark.parametrize("seconds", [1e7, 1e12, 1e300, math.inf])
def test_no_time_is_too_long(seconds: float) -> None:
    fd = os.eventfd(1)
    until_readable([fd], seconds)
    os.close(fd)
