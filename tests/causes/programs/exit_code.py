"""Rank 1 ends with an exit code and no message, through `sys.exit` or `os._exit`."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    how, code = sys.argv[1:]
    if how == "exit":
        sys.exit(int(code))
    os._exit(int(code))
time.sleep(60)
