"""Saves when asked to stop, and ends with 0."""

import signal
import sys
import time

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("READY", flush=True)
time.sleep(600)
