"""Rank 1 raises but does not end, since one of its threads runs on; rank 0 waits for it without a timeout."""

import os
import threading
import time

if os.environ["RANK"] == "1":
    threading.Thread(target=time.sleep, args=(600,), name="prefetcher").start()
    raise ValueError("batch 7 has no labels")
threading.Event().wait()
