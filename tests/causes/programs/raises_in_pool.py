"""A thread of a pool fails on rank 0; the request for its result raises the exception."""

import os
import time
from concurrent.futures import ThreadPoolExecutor


def decode(name: str) -> None:
    raise OSError(f"{name} is no JPEG file")


if os.environ["RANK"] == "0":
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(decode, ["a.jpg", "b.jpg"]))
time.sleep(60)
