"""A data file is missing: all ranks fail."""

import json
from pathlib import Path

json.loads(Path("/data/no-such-set/index.json").read_text())
