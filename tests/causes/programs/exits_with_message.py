"""Rank 1 leaves with a sentence, as scripts do that check their configuration."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    sys.exit("the global batch size 30 is not a multiple of the world size")
time.sleep(60)
