"""Rank 1's standard error is its standard output, as after `exec 2>&1` in a script; its traceback goes there."""

import os
import time

if os.environ["RANK"] == "1":
    os.dup2(1, 2)
    raise ValueError("batch 7 has no labels")
time.sleep(60)
