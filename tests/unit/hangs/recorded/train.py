"""Records the dumps beside this file, by real torch over gloo: `rallyrun --nproc-per-node=4 train.py CASE FOLDER`.

Four ranks in the default process group, two each in one of their own. Cases: rank 3 does not come to the third
all_reduce (`missing`), or calls broadcast there (`mismatch`); rank 1 does not come to its group's barrier (`group`).
`server_3.json` is what torch's worker server answers in the case `missing`, without stacks.
"""

import os
import sys
import threading
import time
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

RECORDER: Any = c10d
"""What torch's own types do not name."""


def dump(case: str, folder: str, rank: int) -> None:
    time.sleep(3)
    with open(f"{folder}/{case}_{rank}", "wb") as file:
        file.write(RECORDER._dump_fr_trace())
    if case == "missing" and rank == 3:
        with open(f"{folder}/server_3.json", "wb") as file:
            file.write(RECORDER._dump_fr_trace_json())
    time.sleep(2)
    os._exit(0)


def main() -> None:
    case, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    one, other = dist.new_group([0, 1]), dist.new_group([2, 3], group_desc="tensor")
    own = one if rank < 2 else other
    data = torch.ones(4)
    dist.all_reduce(data)
    dist.all_reduce(data)
    dist.broadcast(data, 0 if rank < 2 else 2, group=own)
    threading.Thread(target=dump, args=(case, folder, rank)).start()
    if (case, rank) in (("missing", 3), ("group", 1)):
        time.sleep(60)
    if case == "mismatch" and rank == 3:
        dist.broadcast(data, 0)
    elif case == "group" and rank == 0:
        dist.barrier(group=own)
    dist.all_reduce(data)
    time.sleep(60)


if __name__ == "__main__":
    main()
