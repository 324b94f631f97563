"""Torch's launching modules in Rallypoint, beside a small package with torch's name and classes."""

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
    """A folder with a package `torch` and a worker."""
    for name, text in TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "worker.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n")
    return tmp_path


def python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as `rallyctl shim run` does."""
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
    first = next(line for line in ran.stderr.splitlines() if "FutureWarning" not in line)
    assert "instead of python -m torch.distributed." in first


@pytest.mark.parametrize(
    ("words", "variables", "out"),
    [
        (["-m", "torch.distributed.run"], {"RALLYPOINT_SHIM": "0"}, "torch is imported\n"),
        (["-m", "package.run", "-m", "torch.distributed.run"], {}, "torch is imported\n-m torch.distributed.run\n"),
    ],
    ids=["switched off", "another program"],
)
def test_torch_is_left_alone(torch: Path, words: list[str], variables: dict[str, str], out: str) -> None:
    (torch / "package").mkdir()
    (torch / "package/__init__.py").write_text("import torch.distributed\n")
    (torch / "package/run.py").write_text("import sys; print(*sys.argv[1:])\n")
    ran = python(torch, *words, **variables)
    assert (ran.stdout, ran.stderr) == (out, "")


def test_the_hook_imports_nothing_and_loads_the_user_s_sitecustomize(torch: Path) -> None:
    text = "import sys; print([name for name in sys.modules if name.split('.')[0] in ('rallypoint', 'torch')])"
    assert python(torch, "-c", text).stdout == "[]\n"
    (torch / "sitecustomize.py").write_text("print('the own')\n")
    ran = python(torch, "-c", f"import sitecustomize, sys; print(sitecustomize.__file__, {str(HOOK)!r} in sys.path)")
    assert (ran.stdout, ran.stderr) == (f"the own\n{torch / 'sitecustomize.py'} False\n", "")


def test_without_rallypoint_torch_runs(torch: Path) -> None:
    text = "import sys\ntry: import sitecustomize\nexcept ImportError: pass\n"  # which -S leaves out, and all packages
    text += f"sys.path.remove({str(HOOK.parents[2])!r}); import torch.distributed.run as run; run.main(['a'])"
    assert python(torch, "-S", "-c", text).stdout == "torch is imported\ntorch runs ['a']\n"


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
def test_imported_launchers_are_ours(torch: Path, program: str) -> None:
    ran = python(torch, "-c", program)
    assert ran.stdout == "torch is imported\nrank 0 a\n", ran.stderr
    assert "instead of torch.distributed." in ran.stderr.splitlines()[0]


def test_other_names_are_torchs_and_failures_can_be_caught_as_torchs(torch: Path) -> None:
    assert python(torch, "-c", "from torch.distributed.run import logger; print(logger)").stdout.endswith("of torch\n")
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
def test_changed_classes_of_torch_keep_torchs_launcher(torch: Path, change: str, named: str) -> None:
    text = "import torch.distributed.elastic.agent as agent, torch.distributed.launcher.api as api\n"
    text += "from torch.distributed.elastic.agent import LocalElasticAgent\n"
    text += "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
    text += f"{change}\nlaunch = elastic_launch(LaunchConfig(1, 1, 1), 'false')\nlaunch()\n"
    text += "import torch.distributed.run as run; run.main(['a'])"
    ran = python(torch, "-c", text)
    assert ran.stdout.splitlines()[-2:] == ["torch launches torch.distributed.launcher.api", "torch runs ['a']"]
    assert f"the program modified it ({named})" in ran.stderr
