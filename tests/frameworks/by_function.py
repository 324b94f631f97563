"""Starts `training.py` from Python: `by_function.py notebook_launcher|torchrunx|nemo_run FOLDER`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from training import train  # beside this file, where workers find it too


def notebook_launcher(folder: str) -> None:
    from accelerate import notebook_launcher

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    notebook_launcher(train, ("plain", folder), num_processes=2, max_restarts=3, use_port=str(port))


def torchrunx(folder: str) -> None:
    import cloudpickle
    import training
    from torchrunx import Launcher

    cloudpickle.register_pickle_by_value(training)  # its agents have another path
    Launcher(hostnames=["localhost"], workers_per_host=2, backend=None).run(train, "plain", folder)


def nemo_run(folder: str) -> None:
    import nemo_run

    script = nemo_run.Script(str(Path(__file__).with_name("training.py")), args=["plain", folder], entrypoint="python")
    executor = nemo_run.LocalExecutor(ntasks_per_node=2, launcher="torchrun", env_vars={"PET_MAX_RESTARTS": "3"})
    with nemo_run.Experiment("shim", executor=executor, base_dir=f"{folder}/nemo") as experiment:
        experiment.add(script, tail_logs=False)
        experiment.run(detach=False)


if __name__ == "__main__":
    {"notebook_launcher": notebook_launcher, "torchrunx": torchrunx, "nemo_run": nemo_run}[sys.argv[1]](sys.argv[2])
