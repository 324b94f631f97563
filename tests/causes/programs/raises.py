"""Rank 1 raises an exception; the others continue."""

import os
import time


def load_batch(index: int) -> None:
    raise ValueError(f"batch {index} has no labels")


if os.environ["RANK"] == "1":
    load_batch(7)
time.sleep(60)
