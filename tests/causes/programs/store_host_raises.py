"""Rank 0 serves a store of the program's own, and raises; rank 1 loses the store."""

import datetime
import os
import time
from pathlib import Path

import torch.distributed as dist

if os.environ["RANK"] == "0":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Path("port.new").write_text(str(store.port))
    Path("port.new").rename("port")
    store.wait(["rank 1"])
    del store
    try:
        raise ValueError("batch 7 has no labels")
    finally:
        time.sleep(2)
while not Path("port").exists():
    time.sleep(0.01)
client = dist.TCPStore("127.0.0.1", int(Path("port").read_text()), timeout=datetime.timedelta(seconds=20))
client.set("rank 1", "is up")
client.get("weights")
