"""Rank 1 raises, and then a function that it registered with `atexit` raises too."""

import atexit
import os
import time


def close_writer() -> None:
    raise RuntimeError("the summary writer is closed already")


def step() -> None:
    raise FloatingPointError("the loss is nan at step 310")


if os.environ["RANK"] == "1":
    atexit.register(close_writer)
    step()
time.sleep(60)
