"""A C++ library of rank 1 throws, and nothing catches it."""

import os
import time

TOLD = """\
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):
"""

if os.environ["RANK"] == "1":
    frames = "".join(f"frame #{number}: <unknown function> + 0x{number:x} (libtorch.so)\n" for number in range(60))
    os.write(2, (TOLD + frames).encode())
    os.abort()
time.sleep(60)
