"""An extension of rank 1 reads what is not there: SIGSEGV, in a function of Python's that a person knows."""

import ctypes
import os
import time


def fused_kernel() -> None:
    ctypes.string_at(0)


if os.environ["RANK"] == "1":
    fused_kernel()
time.sleep(60)
