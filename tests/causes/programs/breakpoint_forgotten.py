"""A breakpoint was left in the program, and nobody answers it: standard input is at its end."""

import os
import time

if os.environ["RANK"] == "1":
    breakpoint()
    loss = 0.0
time.sleep(60)
