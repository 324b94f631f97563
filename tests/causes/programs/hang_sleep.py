"""Rank 1 retries for ever, with sleeps in between; rank 0 waits for it."""

import os
import threading
import time


def wait_for_lock_file() -> None:
    open("dataset.lock", "w").close()
    while os.path.exists("dataset.lock"):
        time.sleep(5)


if os.environ["RANK"] == "1":
    wait_for_lock_file()
threading.Event().wait()
