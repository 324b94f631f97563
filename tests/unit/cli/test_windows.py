"""On Windows each way in says one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rallypoint.base.errors import NOT_ON_WINDOWS

pytestmark = pytest.mark.process

ON_WINDOWS = "import runpy, sys; sys.platform = 'win32'; sys.argv[1:] = ['--standalone', 'train.py']; "


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ON_WINDOWS + text], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("module", ["rallypoint.run", "rallypoint.cli.rallyrun", "rallypoint.cli.rallyctl"])
def test_commands_end_with_2(module: str) -> None:
    done = python(f"runpy.run_module({module!r}, run_name='__main__')")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {NOT_ON_WINDOWS}\n")


def test_programs_get_an_import_error() -> None:
    done = python("from rallypoint import elastic_launch")
    assert done.stderr.splitlines()[-1] == f"ImportError: {NOT_ON_WINDOWS}"
