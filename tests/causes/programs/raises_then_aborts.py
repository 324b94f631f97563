"""Rank 1 raises, and a C++ library then aborts the process during its teardown."""

import atexit
import os
import time


def tear_down() -> None:
    frames = "".join(f"frame #{number}: <unknown function> + 0x{number:x} (libtorch.so)\n" for number in range(60))
    os.write(2, f"terminate called without an active exception\n{frames}".encode())
    os.abort()


def load_batch(number: int) -> None:
    raise ValueError(f"batch {number} has no labels")


if os.environ["RANK"] == "1":
    atexit.register(tear_down)
    load_batch(7)
time.sleep(60)
