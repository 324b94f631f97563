"""What all tests share."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# `nohup` and a shell's script ignore these for what they start, and processes hand that down.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# Speed is never tested: these machines are small, shared and noisy.
settings.register_profile("rallypoint", deadline=None)
settings.load_profile("rallypoint")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="write what the transcripts play to; review the difference"
    )
