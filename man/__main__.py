"""`python -m man [FOLDER]`: writes the pages and scripts below a folder, `build` if none is given."""

from __future__ import annotations

import sys
from pathlib import Path

from man.share import write_shared_files

for written in write_shared_files(Path(*sys.argv[1:2] or ["build"])):
    print(written)
