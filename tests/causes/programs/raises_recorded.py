"""Rank 1 raises an exception under torch's `@record`."""

import os
import time

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("batch 7 has no labels")
    time.sleep(60)


main()
