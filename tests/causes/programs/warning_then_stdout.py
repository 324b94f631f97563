"""A warning of rank 1 is on standard error, its fatal error on standard output."""

import os
import sys
import time
import traceback
import warnings

if os.environ["RANK"] == "1":
    warnings.warn("lr_scheduler.step() is called before optimizer.step()", stacklevel=1)
    try:
        raise ValueError("batch 7 has no labels")
    except ValueError:
        traceback.print_exc(file=sys.stdout)
        sys.exit(1)
time.sleep(60)
