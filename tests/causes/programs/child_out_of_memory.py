"""A child of rank 1 takes more memory than the control group of the job has; rank 1 says only that it has died."""

import multiprocessing
import os
import time


def load() -> None:
    kept = [os.urandom(1 << 20) for _ in range(700)]
    print(len(kept))


if os.environ["RANK"] == "1":
    child = multiprocessing.get_context("fork").Process(target=load)
    child.start()
    child.join()
    raise RuntimeError(f"loader (pid {child.pid}) exited unexpectedly with {child.exitcode}")
time.sleep(60)
