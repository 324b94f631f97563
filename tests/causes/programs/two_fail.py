"""Two ranks fail on their own, one right after the other, even if it is stopped; the report must name the first."""

import os
import signal
import sys
import time
from pathlib import Path

first, second = sys.argv[1:]
if os.environ["RANK"] == first:
    while not Path(f"{second} is up").exists():
        time.sleep(0.01)
    Path("failing").touch()
    raise ValueError("the first of two failures")
if os.environ["RANK"] == second:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"{second} is up").touch()
    while not Path("failing").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    raise KeyError("the second of two failures")
time.sleep(60)
