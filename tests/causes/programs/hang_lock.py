"""Rank 1 waits for a lock that it holds; rank 0 waits for rank 1."""

import os
import threading


def update_cache() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if os.environ["RANK"] == "1":
    update_cache()
threading.Event().wait()
