"""Rank 1 logs in JSON: its fatal error is a screen above the end, with long fields behind the traceback."""

import json
import os
import sys
import time
import traceback


def log(severity: str, message: str, **more: str) -> None:
    where = {"file": "/home/ann/project/training/loop.py", "host": "n1", "trace": "0" * 200}
    print(json.dumps({"severity": severity, "message": message, **more, **where}), file=sys.stderr)


def train() -> None:
    raise ValueError("batch 7 has no labels")


if os.environ["RANK"] == "1":
    try:
        train()
    except ValueError:
        log("CRITICAL", "training failed", exception=traceback.format_exc())
        for number in range(60):
            log("INFO", f"queue {number} is closed")
        sys.exit(1)
time.sleep(60)
