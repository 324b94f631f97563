"""`rallyctl shim` beside real torch: what callers pass to the launcher, and what they catch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rallypoint.cli import shim
from tests.processes import completed

HOOK = Path(shim.__file__).with_name("shim_path")
GIVES_TORCHS = """
import glob, os, sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.numa.binding import AffinityMode, NumaOptions
def config(**more):
    return LaunchConfig(1, 1, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", **more)
specs = DefaultLogsSpecs("logs", redirects=Std.OUT, tee={1: Std.OUT})
numa = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
print(elastic_launch(config(logs_specs=specs), "sh")("-c", "echo rank $RANK"))
print(sorted(open(each).read().strip() for each in glob.glob("logs/*/attempt_0/*/stdout.log")))
try:
    elastic_launch(config(max_restarts=0, numa_options=numa), "sh")("-c", "exit 3")
except ChildFailedError as error:
    print("caught", error.get_first_failure()[1].exitcode)
"""
IS_PATCHED = """
import sys
import torch.distributed.elastic.agent.server.api as api
import torch.distributed.run as run
whole = api.SimpleElasticAgent.run
def patched(self, *more):
    print("patched", flush=True)
    return whole(self, *more)
api.SimpleElasticAgent.run = patched
run.run(run.parse_args(["--standalone", "--no-python", "echo", "a worker"]))
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
elastic_launch(config, "echo")("another")
"""
CHANGES = """
import importlib, pkgutil
import torch.distributed.elastic as elastic, torch.distributed.run, torch.distributed.launcher.api
for each in pkgutil.walk_packages(elastic.__path__, "torch.distributed.elastic."):
    try:
        importlib.import_module(each.name)
    except ImportError:
        pass  # it needs etcd's package
from rallypoint.compat.shim import _changes
print(type(torch.distributed.run).__module__, list(_changes()))
"""


def output(folder: Path, text: str) -> list[str]:
    """What a program prints under the shim."""
    ran = completed(
        [sys.executable, "-c", text],
        env=os.environ | {"PYTHONPATH": str(HOOK), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        timeout=240,
        check=True,
    )
    return ran.stdout.splitlines()


def test_what_is_torchs_may_be_given_and_caught(tmp_path: Path) -> None:
    said = output(tmp_path, GIVES_TORCHS)
    assert said == ["[default_role1]:rank 1", "{0: None, 1: None}", "['rank 0', 'rank 1']", "caught 3"]


def test_a_program_that_patches_torchs_agent_keeps_it(tmp_path: Path) -> None:
    assert output(tmp_path, IS_PATCHED) == ["patched", "a worker", "patched", "another"]


def test_torch_itself_is_no_change(tmp_path: Path) -> None:
    assert output(tmp_path, CHANGES) == ["rallypoint.compat.shim []"]


@pytest.mark.parametrize("name", ["run", "launch", "launcher", "launcher.api"])
def test_all_public_names_are_there(tmp_path: Path, name: str) -> None:
    text = f"import torch.distributed.{name} as ours; own = ours.torchs_own; print(own is not ours)\n"
    text += "print([each for each in vars(own) if not each.startswith('_') and not hasattr(ours, each)])"
    assert output(tmp_path, text) == ["True", "[]"]
