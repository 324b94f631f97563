"""Rank 1 raises an exception that wraps the one with the reason."""

import os
import time


def read_config() -> None:
    try:
        {"lr": 0.1}["learning_rate"]
    except KeyError as error:
        raise RuntimeError("cannot set up the optimizer") from error


if os.environ["RANK"] == "1":
    read_config()
time.sleep(60)
