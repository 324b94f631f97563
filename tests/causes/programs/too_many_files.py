"""Rank 1 opens more files than its limit allows."""

import os
import resource
import time

if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    shards = [open("/dev/null") for _ in range(100)]  # noqa: SIM115
time.sleep(60)
