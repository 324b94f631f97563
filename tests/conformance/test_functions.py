"""The same functions, and the same `--run-path`, under real torch 2.13 and under ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.conformance.record import From, Record
from tests.jobs.launching import RALLYRUN, Launcher

pytestmark = pytest.mark.torch

TORCHRUN = [str(Path(sys.executable).parent / "torchrun")]

PROGRAM = """
import json, os, sys
{imports}

def values(rank):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID")
    return {{name: os.environ[name] for name in names}}

def nothing(rank):
    return None

def argv(rank):
    return sys.argv, __name__ if {named} else ""

def stdin(rank):
    return os.read(0, 10).decode()

def large(rank):
    return "x" * 2_000_000

def exit_0(rank):
    sys.exit(0)

def exit_3(rank):
    if rank == "1":
        sys.exit(3)

def exit_text(rank):
    sys.exit("a last word")

def raises(rank):
    if os.environ["RANK"] == "0":
        raise KeyError("missing")

def killed(rank):
    os.kill(os.getpid(), 9)

def process_group(rank):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    tensor = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()

def tensor(rank):
    import torch
    return float(rank.sum())

def main(function, method):
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", run_id="job",
                          rdzv_endpoint="localhost:0", max_restarts=0, start_method=method)
    argument = "${{local_rank}}"
    if function == "tensor":
        import torch
        argument = torch.arange(10.0)
    try:
        answer = elastic_launch(config, globals()[function])(argument)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        data = message.get("message", "") if isinstance(message, dict) else ""
        told = message.get("extraInfo", {{}}).get("py_callstack", "") if isinstance(message, dict) else ""
        answer = {{"name": error.name, "exitcode": failure.exitcode, "message": data, "told": "Traceback" in told}}
    print("answer", json.dumps(answer, sort_keys=True).replace("x" * 2_000_000, "large"), flush=True)

if __name__ == "__main__":
    main(sys.argv[2], sys.argv[1])
"""

OURS = """
from rallypoint import ChildFailedError, LaunchConfig, elastic_launch
"""
TORCHS = """
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
"""

SCRIPT = """
import json, multiprocessing, os, sys
process = multiprocessing.current_process().name.partition("-")[0]
facts = [sys.argv, __name__, os.environ["RANK"], process]
os.write(1, (json.dumps(facts) + "\\n").encode())
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
"""


def answer(launcher: Launcher, name: str, imports: str, function: str, method: str, env: dict[str, str]) -> Any:
    script = launcher.script(PROGRAM.format(imports=imports, named=method != "fork"), name)
    job = launcher.command([sys.executable, script, method, function], env)
    assert job.ends() == 0, job.err
    (line,) = [line.removeprefix("answer ").replace(script, "SCRIPT") for line in job.out if line.startswith("answer ")]
    return json.loads(line)


def both(launcher: Launcher, record: Record, function: str, method: str, env: dict[str, str]) -> Any:
    ours = answer(launcher, "ours.py", OURS, function, method, env)
    name, question = f"{method} {function}", [PROGRAM, TORCHS, method, function]
    assert ours == record.answer(
        "functions", name, question, lambda: answer(launcher, "torchs.py", TORCHS, function, method, env), From.PYTHON
    )
    return ours


@pytest.fixture
def temporary() -> Iterator[dict[str, str]]:
    """A folder for what torch leaves, and by both for error files; torch's fork server needs a short path."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield {"TMPDIR": folder}


SPAWNED = "values nothing argv stdin large exit_0 exit_3 exit_text raises killed process_group"
FORKED = "values raises"
SERVED = "values raises"


@pytest.mark.parametrize(
    ("method", "function"),
    [
        (method, function)
        for method, functions in (("spawn", SPAWNED), ("fork", FORKED), ("forkserver", SERVED))
        for function in functions.split()
    ],
)
def test_the_same_comes_of_functions(
    launcher: Launcher, record: Record, temporary: dict[str, str], method: str, function: str
) -> None:
    both(launcher, record, function, method, temporary)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_tensor_is_handed_over(launcher: Launcher, record: Record, temporary: dict[str, str], method: str) -> None:
    assert both(launcher, record, "tensor", method, temporary) == {"0": 45.0, "1": 45.0}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--run-path", "script.py", "${local_rank}"],
        ["--no-python", "--module", "--run-path", "script.py", "$$x"],
        ["--run-path", "--start-method=fork", "script.py"],
        ["--run-path", "--start-method=forkserver", "script.py", "a b"],
        ["--run-path", "script.py", "x", "7"],
    ],
)
def test_the_same_comes_of_run_path(
    launcher: Launcher, record: Record, temporary: dict[str, str], arguments: list[str]
) -> None:
    launcher.script(SCRIPT)

    def found(command: list[str]) -> list[object]:
        job = launcher.command([*command, "--standalone", "--nproc-per-node=2", *arguments], temporary)
        code = job.ends()
        worker = ["7 (pid" in job.err, "FileNotFoundError: [Errno 2]" in job.err, "run_script_path FAILED" in job.err]
        lines = sorted(job.out) if code == 0 else []
        return [code, lines, worker]

    question = [SCRIPT, *arguments]
    assert found(RALLYRUN) == record.answer(
        "functions", " ".join(arguments), question, lambda: found(TORCHRUN), From.PYTHON
    )
