"""A child process of rank 1 raises, and rank 1 exits with the child's code."""

import multiprocessing
import os
import sys
import time


def tokenize() -> None:
    raise LookupError("the merges file has no entry 50257")


if os.environ["RANK"] == "1":
    child = multiprocessing.get_context("fork").Process(target=tokenize)
    child.start()
    child.join()
    sys.exit(child.exitcode)
time.sleep(60)
