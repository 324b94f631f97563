"""After the traceback of rank 1, Python warns of a hundred files that it left open, as `python -X dev` does."""

import os
import time
import warnings

if os.environ["RANK"] == "1":
    warnings.simplefilter("always")
    left_open = [open(__file__) for _ in range(100)]  # noqa: SIM115 - nobody closes them
    raise ValueError("batch 7 has no labels")
time.sleep(60)
