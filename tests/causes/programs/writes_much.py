"""Writes to its console until nobody takes more."""

import time

while True:
    print("step, loss, and whatever else a person wants to read " * 20, flush=True)
    time.sleep(0.001)
