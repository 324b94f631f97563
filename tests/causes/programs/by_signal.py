"""The given signal ends rank 1."""

import os
import signal
import sys
import time

if os.environ["RANK"] == "1":
    number = signal.Signals[sys.argv[1]]
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)
time.sleep(60)
