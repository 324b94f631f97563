"""Launches in copies of a process that has launched before, or is launching: by `os.fork`, and in a worker by fork."""

import json
import os
import sys
import tempfile
import time
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(run_id: str, function: Any, *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            1,
            1,
            2,
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_timeout=20,
            max_restarts=0,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        return sorted(elastic_launch(config, function)(*args).items())


def work(number: int) -> int:
    time.sleep(0.3)  # so long that the job needs its threads
    return number + int(os.environ["RANK"])


def work_below(number: int) -> list[Any]:
    time.sleep(0.3)
    return launch(f"below {os.environ['RANK']}", work, number)


def in_a_copy(number: int) -> list[Any]:
    """What a launch in a forked child returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(launch("copy", work, number)))
        sys.exit()
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return [status, json.loads(said)]


def main() -> None:
    told = [launch("first", work, 10), in_a_copy(20), launch("nested", work_below, 30), launch("last", work, 40)]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
