"""Shared memory is full when rank 1 writes to a batch there: SIGBUS."""

import mmap
import os
import time

if os.environ["RANK"] == "1":
    with open("/dev/shm/batch", "w+b") as file:
        file.truncate(8 << 20)
        batch = mmap.mmap(file.fileno(), 8 << 20)
        batch.write(bytes(8 << 20))
time.sleep(60)
