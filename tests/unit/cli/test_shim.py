"""`rallyctl shim on`, `off` and `status`."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from rallypoint.cli import rallyctl
from rallypoint.cli import shim as shim_verb
from tests.jobs.launching import RALLYCTL
from tests.processes import completed

TORCHS = '#!/bin/sh\necho torch runs "$@"\n'


class Environment:
    """A virtual environment of a few folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin, self.site = folder / "bin", folder / "site-packages"
        self.bin.mkdir(parents=True)
        self.site.mkdir()
        self.torchrun = self.bin / "torchrun"

    def install_torch(self, text: str = TORCHS) -> None:
        self.torchrun.write_text(text)
        self.torchrun.chmod(0o755)

    def files(self) -> dict[str, tuple[bytes, int]]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): (path.read_bytes(), path.stat().st_mode) for path in paths}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    made = Environment(tmp_path / "env")
    paths = {"scripts": made.bin, "purelib": made.site, "stdlib": tmp_path}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(paths[name]))
    monkeypatch.setattr(sys, "prefix", str(made.folder))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.delenv("RALLYPOINT_SHIM", raising=False)
    return made


def shim(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and output."""
    code = rallyctl.main(["shim", *words])
    output = capsys.readouterr()
    return code, output.out + output.err


def test_on_and_off(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    environment.install_torch()
    before = environment.files()
    assert shim(capsys, "status")[0] == 3
    for _ in range(2):  # once more changes nothing
        code, output = shim(capsys, "on")
        assert code == 0
        assert "torch's own is torchrun-torch" in output
        assert environment.files()["bin/torchrun-torch"] == before["bin/torchrun"]
    assert any(name.endswith(".pyc") for name in environment.files())  # so that no start compiles the module
    assert shim(capsys, "status") == (0, output)
    code, output = shim(capsys, "off")
    assert (code, output.splitlines()[0].split()) == (0, ["shim", "off"])
    assert environment.files() == before
    assert shim(capsys, "off")[0] == 0
    assert environment.files() == before


def test_on_and_off_without_torch(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = shim(capsys, "on")
    assert code == 0
    assert "there was none" in output
    assert shim(capsys, "off")[0] == 0
    assert environment.files() == {}


def test_a_newer_torch_is_kept(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    environment.install_torch()
    shim(capsys, "on")
    newer = TORCHS.replace("torch runs", "a newer torch runs")
    environment.torchrun.unlink()
    environment.install_torch(newer)
    code, output = shim(capsys, "status")
    assert code == 3
    assert "partly on" in output
    assert shim(capsys, "on")[0] == 0
    environment.torchrun.unlink()
    environment.install_torch("newest")
    shim(capsys, "off")
    assert [*environment.files()] == ["bin/torchrun"]
    assert environment.torchrun.read_text() == "newest"
    shim(capsys, "on")
    shim(capsys, "off")
    assert environment.torchrun.read_text() == "newest"


def test_a_conda_environment(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    (environment.folder / "conda-meta").mkdir()
    assert "conda environment" in shim(capsys, "on")[1]


@pytest.mark.parametrize(
    ("module", "name", "value", "words"),
    [
        (sys, "base_prefix", None, "is not a virtual environment, but a Python that all programs share"),
        (os, "geteuid", lambda: 4_000_000, ", not to user 4000000"),
        (os, "access", lambda path, _: "site-packages" not in str(path), "is read-only: {} cannot be written to"),
    ],
    ids=["system", "other user", "read-only"],
)
def test_refused_environments(
    module: object,
    name: str,
    value: object,
    words: str,
    environment: Environment,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, value or sys.prefix)
    for verb in ("on", "off") if module is sys else ("on",):
        code, output = shim(capsys, verb)
        assert code == 1
        assert words.format(environment.site) in output
        assert len(output.splitlines()) == 1
    assert "refused" in shim(capsys, "status")[1] or module is not sys
    assert environment.files() == {}


def test_a_full_disk(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, *_: object) -> None:
        raise OSError(28, "No space left on device", path)

    environment.install_torch()
    monkeypatch.setattr(os, "open", full)
    code, output = shim(capsys, "on")
    assert code == 1
    assert "cannot be written: No space left on device" in output
    assert environment.torchrun.read_text() == TORCHS


def test_invalid_arguments(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = shim(capsys, "on", "--", "train.py")
    assert code == 2
    assert "takes no command" in output
    code, output = shim(capsys, "run")
    assert code == 2
    assert "the command is missing" in output


def test_a_path_with_spaces(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/a folder/python")
    shim(capsys, "on")
    assert environment.torchrun.read_text().startswith("#!/bin/sh\n'''exec' '/a folder/python' \"$0\" \"$@\"\n' '''\n")


@pytest.mark.process
@pytest.mark.parametrize("gone", [False, True], ids=["switched off", "Rallypoint is gone"])
def test_torch_s_launcher_is_run(environment: Environment, capsys: pytest.CaptureFixture[str], gone: bool) -> None:
    environment.install_torch()
    shim(capsys, "on")
    torchrun = environment.torchrun
    text = torchrun.read_text().partition("\n")
    torchrun.write_text(f"#!{sys.executable}{' -I' if not gone else ' -IS'}\n{text[2]}")  # -S: without site-packages
    ran = completed([torchrun, "a"], env={"PATH": os.defpath} | ({} if gone else {"RALLYPOINT_SHIM": "0"}))
    assert ran.stdout == "torch runs a\n", ran.stderr
    assert ("no longer installed" in ran.stderr) == gone


@pytest.mark.process
def test_run(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(TORCHS)
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "worker.py").write_text("print('a worker')\n")
    command = "torchrun --standalone worker.py; RALLYPOINT_SHIM=0 torchrun b; "
    command += "python3 $(command -v torchrun) --standalone worker.py"
    ran = completed(
        [*RALLYCTL, "shim", "run", "--", "sh", "-c", command],
        env={
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.defpath}",
            "PYTHONPATH": str(Path(shim_verb.__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
        },
        cwd=tmp_path,
    )
    assert ran.stdout == "a worker\ntorch runs b\na worker\n", ran.stderr
    ran = completed([*RALLYCTL, "shim", "run", "--", "no-such-command"])
    assert ran.returncode == 1
    assert "no-such-command cannot be started: No such file or directory" in ran.stderr
