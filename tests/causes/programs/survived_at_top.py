"""Rank 1 survives an exception at its top level, logs much, and ends for another reason."""

import os
import sys
import time
import traceback

if os.environ["RANK"] == "1":
    try:
        raise ConnectionError("no metrics server; metrics are off")
    except ConnectionError:
        traceback.print_exc(file=sys.stdout if len(sys.argv) > 1 else sys.stderr)
    for step in range(5000):
        print(f"INFO:train:step {step}, loss 2.31", file=sys.stderr)
    sys.exit("no checkpoint may be written: the quota is used up")
time.sleep(60)
