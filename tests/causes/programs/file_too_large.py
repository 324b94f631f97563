"""Rank 0 writes a file that exceeds its size limit."""

import os
import resource
import time

if os.environ["RANK"] == "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with open("checkpoint.pt", "wb") as file:
        file.write(bytes(1 << 20))
time.sleep(60)
