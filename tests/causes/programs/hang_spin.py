"""Rank 1 searches without end and without a pause; rank 0 waits for it."""

import os
import threading

if os.environ["RANK"] == "1":
    os.nice(19)
    while not os.path.exists("done"):
        pass
threading.Event().wait()
