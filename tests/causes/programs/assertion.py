"""A bare assertion of rank 0 fails."""

import os
import time

if os.environ["RANK"] == "0":
    hidden, heads = 1000, 12
    assert hidden % heads == 0
time.sleep(60)
