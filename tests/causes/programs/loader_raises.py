"""A worker of rank 1's data loader raises."""

import os
import time

from torch.utils.data import DataLoader


class Images:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise OSError(f"image {index} is truncated")


if os.environ["RANK"] == "1":
    list(DataLoader(Images(), num_workers=1))
time.sleep(60)
