"""The disks with the job's temporary files and with rank 0's checkpoint are full."""

import os
import time

if os.environ["RANK"] == "0":
    with open(os.environ["TMPDIR"] + "/checkpoint.pt", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
        file.write(bytes(1 << 16))
time.sleep(60)
