"""An extension of rank 1 reads through a null pointer: SIGSEGV, in a Python function that the user knows."""

import ctypes
import os
import time


def fused_kernel() -> None:
    ctypes.string_at(0)


if os.environ["RANK"] == "1":
    fused_kernel()
time.sleep(60)
