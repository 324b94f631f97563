"""Rank 1 uses up its processor time: SIGXCPU."""

import os
import resource
import time

if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_CPU, (1, 5))
    while True:
        pass
time.sleep(60)
