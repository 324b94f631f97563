"""`rallyrun` under a profiler; at exit it writes the calls of the package's functions to the file TRACE_OUT."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from types import FrameType

import rallypoint

_ROOT = os.path.dirname(rallypoint.__file__) + os.sep
_LEFT_OUT = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>"}

_calls: list[tuple[float, str, str]] = []
"""Time on the monotonic clock, path in the package, qualified name."""


def _profile(frame: FrameType, event: str, _argument: object) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(_ROOT) and code.co_name not in _LEFT_OUT:
        _calls.append((time.monotonic(), code.co_filename[len(_ROOT) :], code.co_qualname))


def _write() -> None:
    sys.setprofile(None)
    threading.setprofile(None)
    with open(os.environ["TRACE_OUT"], "w", encoding="utf-8") as out:
        json.dump(_calls, out)


atexit.register(_write)
threading.setprofile(_profile)
sys.setprofile(_profile)
sys.argv[0] = "rallyrun"

from rallypoint.cli.rallyrun import main  # noqa: E402 - what it imports is profiled too

main()
