"""Rank 0 writes a large checkpoint in silence, the others wait; then it raises."""

import os
import time


def save() -> None:
    with open(f"checkpoint-{os.environ['RANK']}", "wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(1 << 20))
            time.sleep(0.2)
    raise ValueError("the optimizer has no state to save")


if os.environ["RANK"] == "0":
    save()
time.sleep(600)
