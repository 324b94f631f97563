"""Rank 1 survives an exception, prints it, and ends for another reason later."""

import os
import sys
import time
import traceback

if os.environ["RANK"] == "1":
    try:
        raise ConnectionError("no metrics server; metrics are off")
    except ConnectionError:
        traceback.print_exc()
    print("step 100, loss 2.31", file=sys.stderr)
    sys.exit("no checkpoint at step 100 may be written: the quota is used up")
time.sleep(60)
