"""After the traceback of rank 1, a function registered for its end prints a line that does not look like a log."""

import atexit
import os
import sys
import time

if os.environ["RANK"] == "1":
    atexit.register(print, "all temporary files are removed\ngoodbye", file=sys.stderr)
    raise ValueError("batch 7 has no labels")
time.sleep(60)
