"""Rank 1 logs its fatal error as one line of JSON on standard error, as containers do, and exits with 1."""

import json
import os
import sys
import time
import traceback

if os.environ["RANK"] == "1":
    try:
        raise ValueError("batch 7 has no labels")
    except ValueError:
        entry = {"severity": "CRITICAL", "message": "training failed", "exception": traceback.format_exc()}
        print(json.dumps(entry), file=sys.stderr)
        sys.exit(1)
time.sleep(60)
