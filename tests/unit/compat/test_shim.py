"""Torch's launching modules, found in Rallypoint, with a small package that has torch's name and its classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rallypoint.compat.shim as shim
from tests.environment import undisturbed
from tests.processes import completed

pytestmark = pytest.mark.process

HOOK = Path(shim.__file__).parents[1] / "cli" / "shim_path"
TORCH = {
    "torch/__init__.py": "print('torch is imported', flush=True)",
    "torch/distributed/__init__.py": "",
    "torch/distributed/run.py": "from torch.distributed.launcher.api import elastic_launch\nlogger = 'of torch'\n"
    "def parse_args(args): return args\n"
    "def run(args): print('torch runs', args, flush=True)\n"
    "def main(args=None): run(parse_args(args))\n",
    "torch/distributed/launch.py": "",
    "torch/distributed/launcher/__init__.py": "from torch.distributed.launcher.api import *\n",
    "torch/distributed/launcher/api.py": "from dataclasses import dataclass\n"
    "from torch.distributed.elastic.agent import LocalElasticAgent\n"
    "@dataclass\nclass LaunchConfig:\n    min_nodes: int\n    max_nodes: int\n    nproc_per_node: int\n"
    "    logs_specs: object = None\n"
    "class elastic_launch:\n    def __init__(self, *given): self.given = given\n"
    "    def __call__(self, *args): print('torch launches', type(self.given[0]).__module__)\n"
    "def launch_agent(config, *more): print('torch launches', type(config).__module__)\n",
    "torch/distributed/elastic/__init__.py": "",
    "torch/distributed/elastic/agent.py": "class LocalElasticAgent:\n    def run(self): pass\n",
    "torch/distributed/elastic/multiprocessing/__init__.py": "",
    "torch/distributed/elastic/multiprocessing/errors.py": "class ChildFailedError(Exception): pass\n",
}
FAILS = """
config = LaunchConfig(1, 1, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=0)
launch = elastic_launch(config, "false")
"""


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A folder with a package `torch`, and a worker that says who has launched it."""
    for name, text in TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "worker.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n")
    return tmp_path


def python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as under `rallyctl shim run`."""
    path = os.pathsep.join([str(HOOK), str(folder), str(HOOK.parents[2])])
    return completed(
        [sys.executable, *arguments],
        env=undisturbed() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"} | variables,
        cwd=folder,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "torch.distributed.run"], "rank 0 a\n"),
        (["-umtorch.distributed.run"], "rank 0 a\n"),
        (["-m", "torch.distributed.launch"], "rank 0 --local-rank=0 a\n"),
    ],
)
def test_python_m_runs_ours_and_imports_no_torch(torch: Path, words: list[str], said: str) -> None:
    ran = python(torch, *words, "--standalone", "worker.py", "a")
    assert ran.stdout == said
    first = next(each for each in ran.stderr.splitlines() if "FutureWarning" not in each)
    assert "instead of python -m torch.distributed." in first


def test_without_the_variable_python_m_runs_torchs(torch: Path) -> None:
    ran = python(torch, "-m", "torch.distributed.run", RALLYPOINT_SHIM="0")
    assert (ran.stdout, ran.stderr) == ("torch is imported\n", "")


def test_another_program_that_imports_torch_gets_torch(torch: Path) -> None:
    (torch / "package").mkdir()
    (torch / "package/__init__.py").write_text("import torch.distributed\n")
    (torch / "package/run.py").write_text("import sys; print(*sys.argv[1:])\n")
    ran = python(torch, "-m", "package.run", "-m", "torch.distributed.run")
    assert ran.stdout == "torch is imported\n-m torch.distributed.run\n", ran.stderr


def test_the_hook_imports_nothing(torch: Path) -> None:
    text = "import sys; print([each for each in sys.modules if each.split('.')[0] in ('rallypoint', 'torch')])"
    assert python(torch, "-c", text).stdout == "[]\n"


def test_without_rallypoint_all_is_torchs(torch: Path) -> None:
    text = "import sys\ntry: import sitecustomize\nexcept ImportError: pass\n"  # which -S leaves out, and all packages
    text += f"sys.path.remove({str(HOOK.parents[2])!r}); import torch.distributed.run as run; run.main(['a'])"
    assert python(torch, "-S", "-c", text).stdout == "torch is imported\ntorch runs ['a']\n"


def test_the_users_own_sitecustomize_is_loaded(torch: Path) -> None:
    (torch / "sitecustomize.py").write_text("print('the own')\n")
    ran = python(torch, "-c", f"import sitecustomize, sys; print(sitecustomize.__file__, {str(HOOK)!r} in sys.path)")
    assert (ran.stdout, ran.stderr) == (f"the own\n{torch / 'sitecustomize.py'} False\n", "")


@pytest.mark.parametrize(
    "program",
    [
        "import torch.distributed.run as run; run.main(['--standalone', 'worker.py', 'a'])",
        "from torch.distributed.run import *; run(parse_args(['--standalone', 'worker.py', 'a']))",
        "from torch.distributed import run; parser = run.get_args_parser(); "
        "run.run(parser.parse_args(['--standalone', 'worker.py', 'a']))",
        "from torch.distributed.launcher import LaunchConfig, elastic_launch; import sys; "
        "config = LaunchConfig(1, 1, 1, run_id='j', rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:0'); "
        "elastic_launch(config, sys.executable)('-u', 'worker.py', 'a')",
        "import torch.distributed.launcher.api as api, sys; "
        "config = api.LaunchConfig(1, 1, 1, run_id='j', rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:0'); "
        "api.launch_agent(config, sys.executable, ['-u', 'worker.py', 'a'])",
    ],
)
def test_what_a_program_imports_launches_here(torch: Path, program: str) -> None:
    ran = python(torch, "-c", program)
    assert ran.stdout == "torch is imported\nrank 0 a\n", ran.stderr
    assert "instead of torch.distributed." in ran.stderr.splitlines()[0]


def test_a_name_that_is_not_ours_is_torchs(torch: Path) -> None:
    assert python(torch, "-c", "from torch.distributed.run import logger; print(logger)").stdout.endswith("of torch\n")


def test_a_failure_can_be_caught_as_torchs(torch: Path) -> None:
    text = "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError as Torchs\n"
    text += "from rallypoint import ChildFailedError\n"
    text += "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n" + FAILS
    text += "try: launch()\nexcept Torchs as error: print(isinstance(error, ChildFailedError), type(error).__name__)\n"
    assert python(torch, "-c", text).stdout.splitlines()[-1] == "True ChildFailedError"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("class Mine(LocalElasticAgent): pass", "__main__.Mine"),
        ("LocalElasticAgent.run = lambda self: None", "torch.distributed.elastic.agent.LocalElasticAgent.run"),
        ("agent.LocalElasticAgent = type('Mine', (), {})", "torch.distributed.elastic.agent.LocalElasticAgent"),
        ("api.LocalElasticAgent = object", "torch.distributed.launcher.api.LocalElasticAgent"),
    ],
)
def test_a_program_that_changes_torchs_classes_keeps_torchs_launcher(torch: Path, change: str, named: str) -> None:
    text = "import torch.distributed.elastic.agent as agent, torch.distributed.launcher.api as api\n"
    text += "from torch.distributed.elastic.agent import LocalElasticAgent\n"
    text += "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
    text += f"{change}\nlaunch = elastic_launch(LaunchConfig(1, 1, 1), 'false')\nlaunch()\n"
    text += "import torch.distributed.run as run; run.main(['a'])"
    ran = python(torch, "-c", text)
    assert ran.stdout.splitlines()[-2:] == ["torch launches torch.distributed.launcher.api", "torch runs ['a']"]
    assert f"the program modified it ({named})" in ran.stderr


def test_where_nothing_is_changed_nothing_is_found() -> None:
    assert list(shim._changes()) == []
