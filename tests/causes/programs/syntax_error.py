"""The script itself has a syntax error: all ranks fail."""

import runpy
from pathlib import Path

Path("train.py").write_text("def train(model:\n    model.fit()\n")

runpy.run_path("train.py")
