"""Rank 1 exits with a sentence, like scripts that check their configuration."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    sys.exit("the global batch size 30 is not a multiple of the world size")
time.sleep(60)
