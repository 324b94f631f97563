"""A function as entry point, and what it returns or raises."""

import json
import os
import tempfile
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


@record
def work(base: int, fail: bool = False) -> list[int]:
    rank = int(os.environ["RANK"])
    if fail and rank == 1:
        raise ValueError("as wanted")
    return [base + rank, int(os.environ["WORLD_SIZE"])]


def main() -> None:
    told: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for start_method in ("spawn", "fork"):
            config = LaunchConfig(
                1,
                1,
                2,
                run_id="j",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                start_method=start_method,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            told.append(sorted(elastic_launch(config, work)(10).items()))
            try:
                elastic_launch(config, work)(10, True)
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                told.append([rank, failure.exitcode, "as wanted" in str(failure.message), error.name])
        envs = {rank: {"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)}
        made = start_processes("n", work, {0: (1,), 1: (2,)}, envs, DefaultLogsSpecs(log_dir=folder))
        result = made.wait(60)
        assert result is not None
        told += [sorted(result.return_values.items()), result.is_failed()]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
