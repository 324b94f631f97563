"""Rank 1 is a launcher itself, whose worker fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

if os.environ["RANK"] == "1":
    Path("inner.py").write_text("raise ValueError('the inner program has no data')\n")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
    command = [sys.executable, "-m", "rallypoint.run", "--standalone", "inner.py"]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)
time.sleep(60)
