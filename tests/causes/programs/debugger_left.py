"""Rank 0 reaches a breakpoint, and the person at it types q."""

import os
import sys
import time

if os.environ["RANK"] == "0":
    os.dup2(os.open("answers", os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    breakpoint()
    loss = 0.0
time.sleep(60)
