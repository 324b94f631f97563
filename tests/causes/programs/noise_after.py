"""After the traceback of rank 1, its libraries write much more during its teardown."""

import atexit
import os
import time


def tear_down() -> None:
    for number in range(20_000):
        os.write(2, f"[W socket.cpp:464] connection {number} is shut down\n".encode())


if os.environ["RANK"] == "1":
    atexit.register(tear_down)
    raise ValueError("the learning rate must be positive")
time.sleep(60)
