"""The disk that has the job's temporary files is full, and so is that of rank 0's checkpoint."""

import os
import time

if os.environ["RANK"] == "0":
    with open(os.environ["TMPDIR"] + "/checkpoint.pt", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
        file.write(bytes(1 << 16))
time.sleep(60)
