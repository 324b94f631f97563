"""The logger of rank 1 puts its prefix before each line of the fatal error, and logs another screen."""

import os
import sys
import time
import traceback

if os.environ["RANK"] == "1":
    try:
        raise ValueError("batch 7 has no labels")
    except ValueError:
        for line in traceback.format_exc().splitlines():
            print(f"2024-11-28 17:05:15,552 | ERROR | {line}", file=sys.stderr)
        for number in range(60):
            print(f"2024-11-28 17:05:15,{number} | INFO | queue {number} is closed", file=sys.stderr)
        sys.exit(1)
time.sleep(60)
