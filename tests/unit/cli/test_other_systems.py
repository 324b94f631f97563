"""On other systems than Linux each way in says one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rallypoint.base.errors import NEEDS_LINUX

pytestmark = pytest.mark.process

ELSEWHERE = "import runpy, sys; sys.platform = {system!r}; sys.argv[1:] = ['--standalone', 'train.py']; "


def python(system: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ELSEWHERE.format(system=system) + text]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("system", ["win32", "darwin"])
@pytest.mark.parametrize("module", ["rallypoint.run", "rallypoint.cli.rallyrun", "rallypoint.cli.rallyctl"])
def test_commands_end_with_2(module: str, system: str) -> None:
    done = python(system, f"runpy.run_module({module!r}, run_name='__main__')")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {NEEDS_LINUX}\n")


def test_programs_get_an_import_error() -> None:
    done = python("darwin", "from rallypoint import elastic_launch")
    assert done.stderr.splitlines()[-1] == f"ImportError: {NEEDS_LINUX}"
