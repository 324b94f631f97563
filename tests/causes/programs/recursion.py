"""A function of rank 1 calls itself without end."""

import os
import time


def flatten(tree: list[object]) -> object:
    return flatten([tree])


if os.environ["RANK"] == "1":
    flatten([])
time.sleep(60)
