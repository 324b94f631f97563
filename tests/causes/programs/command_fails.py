"""Rank 0 builds an extension with a command, which fails."""

import os
import subprocess
import time

if os.environ["RANK"] == "0":
    subprocess.run(["sh", "-c", "echo 'nvcc: fatal: unsupported GPU architecture compute_120' >&2; exit 2"], check=True)
time.sleep(60)
