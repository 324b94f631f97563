"""Rank 1 raises, and during its teardown a thousand finalizers raise too: more than the agent keeps of its output."""

import os
import time


class Cache:
    def __del__(self) -> None:
        raise AttributeError("the cache has no file")


def evaluate() -> None:
    raise ZeroDivisionError("the validation set is empty")


if os.environ["RANK"] == "1":
    caches = [Cache() for _ in range(1000)]
    evaluate()
time.sleep(60)
