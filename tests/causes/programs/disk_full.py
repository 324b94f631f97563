"""The disk is full when rank 0 saves."""

import os
import time


def save(path: str) -> None:
    with open(path, "wb") as file:
        file.write(bytes(1 << 20))


if os.environ["RANK"] == "0":
    save("/dev/full")
time.sleep(60)
