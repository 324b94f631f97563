"""Rank 1 raises while a progress bar is unfinished: the traceback begins behind it, in the same line."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    for step in range(50):
        sys.stderr.write(f"\r{step}%|#####     | {step}/100 [00:01<00:01, 50.00it/s]")
        sys.stderr.flush()
    raise ValueError("batch 7 has no labels" + "\n  field" * 60)
time.sleep(60)
