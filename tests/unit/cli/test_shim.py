"""`rallyctl shim on`, `off` and `status`, over an environment that is a few folders."""

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
    """A virtual environment as far as the verb looks at one."""

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
        paths = sorted(each for each in self.folder.rglob("*") if each.is_file())
        return {str(each.relative_to(self.folder)): (each.read_bytes(), each.stat().st_mode) for each in paths}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    made = Environment(tmp_path / "env")
    paths = {"scripts": made.bin, "purelib": made.site, "stdlib": tmp_path}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(paths[name]))
    monkeypatch.setattr(sys, "prefix", str(made.folder))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.delenv("RALLYPOINT_SHIM", raising=False)
    return made


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code, and what was said."""
    code = rallyctl.main(["shim", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_on_and_off_leave_what_was_there(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    environment.install_torch()
    before = environment.files()
    assert answer(capsys, "status")[0] == 3
    for _ in range(2):  # once more changes nothing
        code, said = answer(capsys, "on")
        assert code == 0
        assert "torch's own is torchrun-torch" in said
        assert environment.files()["bin/torchrun-torch"] == before["bin/torchrun"]
    assert any(each.endswith(".pyc") for each in environment.files())  # so that no start compiles the module
    assert answer(capsys, "status") == (0, said)
    code, said = answer(capsys, "off")
    assert (code, said.splitlines()[0].split()) == (0, ["shim", "off"])
    assert environment.files() == before
    assert answer(capsys, "off")[0] == 0
    assert environment.files() == before


def test_where_there_was_no_torchrun_there_is_none_again(
    environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = answer(capsys, "on")
    assert code == 0
    assert "there was none" in said
    assert answer(capsys, "off")[0] == 0
    assert environment.files() == {}


def test_a_newer_torch_is_kept_in_its_turn(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    environment.install_torch()
    answer(capsys, "on")
    newer = TORCHS.replace("torch runs", "a newer torch runs")
    environment.torchrun.unlink()
    environment.install_torch(newer)
    code, said = answer(capsys, "status")
    assert code == 3
    assert "partly on" in said
    assert answer(capsys, "on")[0] == 0
    answer(capsys, "off")
    assert environment.torchrun.read_text() == newer


def test_off_leaves_a_newer_torch_alone(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    environment.install_torch()
    answer(capsys, "on")
    environment.torchrun.unlink()
    environment.install_torch("newer")
    answer(capsys, "off")
    assert [*environment.files()] == ["bin/torchrun"]
    assert environment.torchrun.read_text() == "newer"


def test_conda_is_known_by_its_folder(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    (environment.folder / "conda-meta").mkdir()
    assert "conda environment" in answer(capsys, "on")[1]


def test_the_python_of_the_system_is_refused(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    for verb in ("on", "off"):
        code, said = answer(capsys, verb)
        assert code == 1
        assert "is not a virtual environment, but a Python that all programs share" in said
        assert len(said.splitlines()) == 1
    assert "refused" in answer(capsys, "status")[1]
    assert environment.files() == {}


def test_anothers_environment_is_refused(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    code, said = answer(capsys, "on")
    assert code == 1
    assert ", not to user 4000000" in said
    assert environment.files() == {}


def test_a_read_only_one_is_refused(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != environment.site)  # root may write everywhere
    code, said = answer(capsys, "on")
    assert code == 1
    assert f"is read-only: {environment.site} cannot be written to" in said
    assert environment.files() == {}


def test_a_disk_that_refuses_is_a_sentence(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, *_: object) -> None:
        raise OSError(28, "No space left on device", path)

    environment.install_torch()
    monkeypatch.setattr(os, "open", full)
    code, said = answer(capsys, "on")
    assert code == 1
    assert "cannot be written: No space left on device" in said
    assert environment.torchrun.read_text() == TORCHS


def test_what_cannot_be_meant_is_said(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capsys, "on", "--", "train.py")
    assert code == 2
    assert "takes no command" in said
    code, said = answer(capsys, "run")
    assert code == 2
    assert "the command is missing" in said


def test_a_long_or_spaced_path_to_python_is_no_shebang(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/a folder/python")
    answer(capsys, "on")
    assert environment.torchrun.read_text().startswith("#!/bin/sh\n'''exec' '/a folder/python' \"$0\" \"$@\"\n' '''\n")


@pytest.mark.process
@pytest.mark.parametrize("gone", [False, True], ids=["switched off", "Rallypoint is gone"])
def test_torchs_own_is_run(environment: Environment, capsys: pytest.CaptureFixture[str], gone: bool) -> None:
    environment.install_torch()
    answer(capsys, "on")
    torchrun = environment.torchrun
    text = torchrun.read_text().partition("\n")
    torchrun.write_text(f"#!{sys.executable}{' -I' if not gone else ' -IS'}\n{text[2]}")  # -S: without site-packages
    ran = completed([torchrun, "a"], env={"PATH": os.defpath} | ({} if gone else {"RALLYPOINT_SHIM": "0"}))
    assert ran.stdout == "torch runs a\n", ran.stderr
    assert ("no longer installed" in ran.stderr) == gone


@pytest.mark.process
def test_run_puts_ours_in_front(tmp_path: Path) -> None:
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


@pytest.mark.process
def test_a_command_that_is_not_there_is_a_sentence() -> None:
    command = [*RALLYCTL, "shim", "run", "--", "no-such-command"]
    ran = completed(command)
    assert ran.returncode == 1
    assert "no-such-command cannot be started: No such file or directory" in ran.stderr
