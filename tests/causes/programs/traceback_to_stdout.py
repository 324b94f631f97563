"""Rank 1 prints its traceback to standard output, and exits with 1."""

import os
import sys
import time
import traceback

if os.environ["RANK"] == "1":
    try:
        raise ValueError("batch 7 has no labels")
    except ValueError:
        traceback.print_exc(file=sys.stdout)
        sys.exit(1)
time.sleep(60)
