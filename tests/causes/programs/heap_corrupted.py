"""An extension of rank 1 frees memory that was not allocated: the C library ends the process."""

import ctypes
import os
import time


def release(buffer: ctypes.Array[ctypes.c_char]) -> None:
    ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(buffer) + 16))


if os.environ["RANK"] == "1":
    release(ctypes.create_string_buffer(4096))
time.sleep(60)
