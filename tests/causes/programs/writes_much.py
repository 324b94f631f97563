"""Writes to its console until nothing reads it any more."""

import time

while True:
    print("step, loss, and whatever else a person wants to read " * 20, flush=True)
    time.sleep(0.001)
