"""How many GPUs CUDA itself counts for each value of CUDA_VISIBLE_DEVICES among the arguments.

CUDA reads the variable once per process, at its first use. So each value is tried in a fork of this process, which has
imported torch but not used CUDA.
"""

from __future__ import annotations

import os
import sys

import torch

from tests.gpu.programs.telling import tell


def main() -> None:
    for value in sys.argv[1:]:
        if not (pid := os.fork()):
            os.environ["CUDA_VISIBLE_DEVICES"] = value
            try:
                count = torch._C._cuda_getDeviceCount()
            except Exception:  # CUDA refuses to start with this value
                count = 0
            tell("visible", value=value, count=count)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
