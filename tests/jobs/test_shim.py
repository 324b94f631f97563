"""`rallyctl shim on` in a real environment of each kind: a job of `torchrun`, and of `python -m`, is ours until `off`.

The environments have Rallypoint and its dependencies from where these tests have them, and a `torchrun` that stands for
torch's. One that is made by a tool is left out where the tool is not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environment import undisturbed
from tests.processes import completed

TORCHS = '#!/bin/sh\necho torch runs "$@"\n'


def by_venv(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)


def by_uv(folder: Path) -> None:
    if (uv := shutil.which("uv")) is None:
        pytest.skip("uv is not installed")
    subprocess.run([uv, "venv", "-q", "--offline", "--python", sys.executable, folder], check=True, timeout=120)


def by_pipx(folder: Path) -> None:
    """What pipx makes: a virtual environment that shares pip by a `.pth` file."""
    by_venv(folder)
    (site_of(folder) / "pipx_shared.pth").write_text("/nowhere\n")


def by_conda(folder: Path) -> None:
    """An interpreter with a prefix of its own, and conda's folder of records."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = folder / "lib" / version
    (folder / "bin").mkdir(parents=True)
    (library / "site-packages").mkdir(parents=True)
    (folder / "conda-meta").mkdir()
    shutil.copy2(os.path.realpath(sys.executable), folder / "bin" / "python")
    for each in Path(sysconfig.get_path("stdlib")).iterdir():
        if each.name != "site-packages":
            (library / each.name).symlink_to(each)


def site_of(folder: Path) -> Path:
    (site,) = folder.glob("lib/python*/site-packages")
    return site


def said(command: list[str], folder: Path, **variables: str) -> str:
    """What a command prints, which succeeds."""
    environ = undisturbed() | {"PATH": f"{folder}/bin:{os.defpath}", "OMP_NUM_THREADS": "1"} | variables
    ran = completed(command, env=environ, cwd=folder, check=True)
    return ran.stdout


@pytest.mark.parametrize("make", [by_venv, by_conda, by_uv, by_pipx])
def test_a_launch_is_ours_until_it_is_switched_off(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "env"
    make(folder)
    paths = [*(each for each in sys.path if "site-packages" in each), str(Path(__file__).parents[2] / "src")]
    (site_of(folder) / "tests.pth").write_text("\n".join(paths) + "\n")
    (folder / "worker.py").write_text("print('ours')\n")
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(TORCHS)
    torchrun.chmod(0o755)

    def launched(**variables: str) -> str:
        return said(["torchrun", "--standalone", "worker.py"], folder, **variables)

    def shim(verb: str) -> str:
        return said([f"{folder}/bin/python", "-m", "rallypoint.cli.rallyctl", "shim", verb], folder)

    before = {each: each.read_bytes() for each in folder.glob("**/*torchrun*")}
    assert shim("on").startswith("shim      on\n")
    assert launched() == "ours\n"
    by_module = [f"{folder}/bin/python", "-m", "torch.distributed.run", "--standalone", "worker.py"]
    assert said(by_module, folder) == "ours\n"
    assert launched(RALLYPOINT_SHIM="0") == "torch runs --standalone worker.py\n"
    assert shim("off").startswith("shim      off\n")
    assert launched() == "torch runs --standalone worker.py\n"
    assert {each: each.read_bytes() for each in folder.glob("**/*torchrun*")} == before
    assert not list(folder.glob("**/rallypoint-shim.pth"))
