"""Rank 1 prints a traceback in the colours of Python 3.13, and ends."""

import os
import sys
import time

COLOURED = (
    "Traceback (most recent call last):\n"
    '  File \x1b[35m"/home/ann/train.py"\x1b[0m, line \x1b[35m12\x1b[0m, in \x1b[35m<module>\x1b[0m\n'
    "    \x1b[31mload_batch\x1b[0m\x1b[1;31m(7)\x1b[0m\n"
    "    \x1b[31m~~~~~~~~~~\x1b[0m\x1b[1;31m^^^\x1b[0m\n"
    "\x1b[1;35mValueError\x1b[0m: \x1b[35mbatch 7 has no labels\x1b[0m\n"
)

if os.environ["RANK"] == "1":
    sys.stderr.write(COLOURED)
    sys.exit(1)
time.sleep(60)
