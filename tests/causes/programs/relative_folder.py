"""Rank 1 raises under `@record` after the program changed its folder, as hydra does."""

import os
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    Path("outputs").mkdir(exist_ok=True)
    os.chdir("outputs")
    if os.environ["RANK"] == "1":
        raise ValueError("batch 7 has no labels")
    time.sleep(60)


main()
