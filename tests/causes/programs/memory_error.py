"""Rank 1 asks for more memory than its limit allows."""

import os
import resource
import time

if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    cache = bytearray(4 << 30)
time.sleep(60)
