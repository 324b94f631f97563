"""Rank 1 takes more memory than the control group of the job has: the kernel kills it."""

import os
import time

if os.environ["RANK"] == "1":
    kept = [os.urandom(1 << 20) for _ in range(700)]
time.sleep(60)
