"""Rank 1 reads from a source that never writes, like a mount whose server is gone; rank 0 waits for it."""

import os
import threading


def read_shard() -> bytes:
    os.mkfifo("shard")
    with open("shard", "rb") as file:
        return file.read()


if os.environ["RANK"] == "1":
    read_shard()
threading.Event().wait()
