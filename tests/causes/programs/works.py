"""Works until it is asked to end."""

import time

print("READY", flush=True)
time.sleep(600)
