"""A thread of rank 1 fails; its main thread notices, and exits with 1."""

import os
import sys
import threading
import time


def prefetch() -> None:
    raise ConnectionRefusedError("the object store refuses shard 12")


if os.environ["RANK"] == "1":
    thread = threading.Thread(target=prefetch, name="prefetcher")
    thread.start()
    thread.join()
    sys.exit(1)
time.sleep(60)
