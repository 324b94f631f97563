"""The main function of rank 1 logs its fatal error and a goodbye, and returns an exit code, like many commands."""

import logging
import os
import sys
import time


def train() -> None:
    raise ValueError("batch 7 has no labels")


def main() -> int:
    try:
        train()
    except Exception:
        logging.exception("training failed")
        print("please report this", file=sys.stderr)
        return 1
    return 0


if os.environ["RANK"] == "1":
    sys.exit(main())
time.sleep(60)
