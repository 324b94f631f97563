"""Works until it is told to end."""

import time

print("READY", flush=True)
time.sleep(600)
