"""A child of rank 1 takes more memory than the control group of the job has; rank 1 says nothing, and exits with 1."""

import multiprocessing
import os
import sys
import time


def load() -> None:
    kept = [os.urandom(1 << 20) for _ in range(700)]
    print(len(kept))


if os.environ["RANK"] == "1":
    child = multiprocessing.get_context("fork").Process(target=load)
    child.start()
    child.join()
    sys.exit(1)
time.sleep(60)
