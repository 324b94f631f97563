"""Rank 1 has rich's tracebacks, and its libraries log more than a screen during its teardown."""

import atexit
import os
import sys
import time

from rich.traceback import install


def tear_down() -> None:
    for number in range(100):
        print(f"[W1128 17:05:15.552 7 socket.cpp:464] connection {number} is shut down", file=sys.stderr)


def load_batch(number: int) -> None:
    raise ValueError(f"batch {number} has no labels")


install(show_locals=True)
if os.environ["RANK"] == "1":
    atexit.register(tear_down)
    load_batch(7)
time.sleep(60)
