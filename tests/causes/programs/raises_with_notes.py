"""The exception of rank 1 has notes (PEP 678) that say what is wrong, one of them with several lines."""

import os
import time

if os.environ["RANK"] == "1":
    error = ValueError()
    error.add_note("while reading shard 12")
    error.add_note("the index has:\n\n  batch 7 has no labels")
    raise error
time.sleep(60)
