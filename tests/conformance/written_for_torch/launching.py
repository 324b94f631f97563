"""The launcher's functions, called as programs of torch's users call them."""

import argparse
import json
import os
import sys
import tempfile
from typing import Any

from torch.distributed import run
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launch import main as old_main
from torch.distributed.launch import parse_args as old_parse_args
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

COMMAND_LINES = [
    ["--master-port=8", "x.py"],
    ["--nnodes=1:4", "--nproc-per-node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "x.py", "--flag", "a"],
    ["--master-addr=h", "--master-port=7", "--node-rank=1", "--nnodes=2", "-m", "mod", "b"],
    ["--master-port=8", "--tee=3", "--redirects=0:1", "--local-ranks-filter=0", "--max-restarts=2", "--role=r", "x.py"],
    ["--master-port=8", "--duplicate-stdout-filters=a,b", "--no-python", "prog", "c", "d"],
]

TELL = (
    "import os, sys; "
    "open(sys.argv[-1] + os.environ['RANK'], 'w').write(' '.join([*sys.argv[1:-1], os.environ['LOCAL_RANK']]))"
)


FIELDS = """
min_nodes max_nodes nproc_per_node run_id role rdzv_endpoint rdzv_backend rdzv_configs max_restarts monitor_interval
start_method local_addr signals_to_handle duplicate_stdout_filters shutdown_timeout
"""


TORCHS_OWN = """
nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts monitor_interval start_method
event_log_handler role module no_python run_path log_dir redirects tee local_ranks_filter duplicate_stdout_filters
duplicate_stderr_filters node_rank master_addr master_port local_addr logs_specs numa_binding signals_to_handle
shutdown_timeout virtual_local_rank training_script training_script_args use_env mine
"""


def shown(config: LaunchConfig, program: Any, arguments: list[str]) -> list[Any]:
    return [{name: getattr(config, name) for name in FIELDS.split()}, program, arguments]


def torch_flags(args: argparse.Namespace) -> dict[str, Any]:
    """What torch's parser knows of: no flags of Rallypoint alone, nor what it keeps for itself."""
    known = TORCHS_OWN.split()
    return {name: value for name, value in vars(args).items() if name in known}


def parsing() -> list[Any]:
    os.environ["PET_MONITOR_INTERVAL"] = "0.5"
    told: list[Any] = []
    for words in COMMAND_LINES:
        line = ["--log-dir=logs", *words]
        args = run.parse_args(line)
        told += [torch_flags(args), run.get_rdzv_endpoint(args), run.get_use_env(args)]
        told += [shown(*run.config_from_args(args))]
        parser = run.get_args_parser()
        parser.add_argument("--mine", default="yes")
        told += [torch_flags(parser.parse_args(line)), torch_flags(old_parse_args(["--use-env", *line]))]
    told += [run.parse_min_max_nnodes("2:5"), run.determine_local_world_size("4")]
    return told


def actions() -> list[Any]:
    os.environ |= {"PET_FOUND": "there", "PET_ON": "1"}
    parser = argparse.ArgumentParser()
    parser.add_argument("--found", action=env, required=True)
    parser.add_argument("--lost", action=env, type=int, default=3)
    parser.add_argument("--on", action=check_env)
    parser.add_argument("--off", action=check_env)
    return [vars(parser.parse_args([])), vars(parser.parse_args(["--found=x", "--lost=4", "--off"]))]


def written(prefix: str) -> list[str]:
    found = []
    for rank in range(2):
        with open(prefix + str(rank)) as file:
            found.append(file.read())
    return found


def running(folder: str) -> list[Any]:
    told: list[Any] = []
    config = LaunchConfig(
        1,
        1,
        2,
        run_id="j",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
    )
    told.append(elastic_launch(config, sys.executable)("-c", TELL, "${local_rank}", f"{folder}/launch"))
    told.append(written(f"{folder}/launch"))
    try:
        elastic_launch(config, sys.executable)("-c", "raise SystemExit(5)")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told.append([rank in (0, 1), failure.exitcode, error.name.startswith("-") or "python" in error.name])
    script = f"{folder}/tell.py"
    with open(script, "w") as file:
        file.write(TELL)
    flags = ["--standalone", "--nproc-per-node=2", f"--log-dir={folder}", "--redirects=3"]
    run.main([*flags, script, "word", f"{folder}/run"])
    told.append(written(f"{folder}/run"))
    old_main([*flags, script, "word", f"{folder}/old"])
    told.append(written(f"{folder}/old"))
    old_main([*flags, "--use-env", script, "word", f"{folder}/new"])
    told.append(written(f"{folder}/new"))
    argv = sys.argv
    os.environ |= {"RANK": "0", "LOCAL_RANK": "7"}
    run.run_script_path(script, "here", f"{folder}/path")
    sys.argv = argv
    with open(f"{folder}/path0") as file:
        told.append(file.read())
    return told


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([parsing(), actions(), running(folder)], sort_keys=True, default=str))


main()
