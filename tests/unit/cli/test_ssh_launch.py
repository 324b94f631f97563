"""Impossible launches of `rallyctl launch`, refused before a host is reached."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rallypoint.cli.rallyctl import load, main
from rallypoint.cli.ssh_launch import LaunchedCommand, read_command
from rallypoint.cli.verbs import VERBS
from tests.processes import completed

HOSTS = "--hosts=a:4,b:4"
RALLYRUN = ["--", "rallyrun", "train.py"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the command is missing; write it after --"),
        ([HOSTS], "the command is missing; write it after --"),
        ([HOSTS, "--"], "the command is missing; write it after --"),
        (RALLYRUN, "--hosts and --hostfile are both missing; use one of them"),
        ([HOSTS, "--hostfile=x", *RALLYRUN], "--hosts and --hostfile are both set; use only one of them"),
        (["--hostfile=missing", *RALLYRUN], "--hostfile='missing' cannot be read: No such file or directory"),
        (["--hostfile=.", *RALLYRUN], "--hostfile='.' cannot be read: Is a directory"),
        (["--hosts=a b", *RALLYRUN], "'a b' is not a valid host name or address"),
        ([HOSTS, "--env=MISSING", *RALLYRUN], "--env=MISSING: this variable is not set here"),
        ([HOSTS, "--env=1=2", *RALLYRUN], "--env: '1' is not a valid variable name"),
        ([HOSTS, "--env-file=missing", *RALLYRUN], "--env-file='missing' cannot be read"),
        ([HOSTS, "--env-file=bad", *RALLYRUN], "bad, line 1: 'not a variable' is not a valid variable name"),
        ([HOSTS, "--env-file=/dev/zero", *RALLYRUN], "--env-file='/dev/zero' has more than 1048576 bytes"),
        (["--hostfile=/dev/zero", *RALLYRUN], "--hostfile='/dev/zero' has more than 1048576 bytes"),
        ([HOSTS, "--ssh-args='", *RALLYRUN], "cannot be parsed: No closing quotation; quote it as for a shell"),
        (
            [HOSTS, "--connect-timeout=0", *RALLYRUN],
            "--connect-timeout='0' is not a number of seconds from 1",
        ),
        ([HOSTS, "--lost-after=x", *RALLYRUN], "--lost-after='x' is not a number of seconds"),
        ([HOSTS, "--grace=1e3", *RALLYRUN], "--grace='1e3' is not a number of seconds"),
        ([HOSTS, "--grace=99999999999", *RALLYRUN], "is not a number of seconds from 1 to 86400"),
        ([HOSTS, "--", "rallyrun", "--nnodes=3", "t.py"], "--nnodes=3 needs 3 nodes, but 2 hosts are listed"),
        ([HOSTS, "--env=PET_NNODES=3:4", *RALLYRUN], "PET_NNODES=3:4 needs 3 nodes, but 2 hosts are listed"),
    ],
)
def test_impossible_launches(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_text("not a variable\n")
    assert main(["launch", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rallyctl: error: ")
    assert sentence in line


@pytest.mark.process
def test_help_imports_no_verb() -> None:
    assert [verb.name for verb in VERBS if not callable(load(verb.work))] == []
    program = "import sys; from rallypoint.cli.rallyctl import build_parser; build_parser(); print(*sys.modules)"
    ran = completed([sys.executable, "-c", program], check=True)
    files = {verb.work.partition(":")[0] for verb in VERBS}
    assert not files & {name.removeprefix("rallypoint.cli.") for name in ran.stdout.split()}
    assert not [
        name for name in ran.stdout.split() if name.startswith("rallypoint.clusters.remote") or name == "asyncio"
    ]


def test_errors_of_rallyrun_s_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", HOSTS, "--", "rallyrun", "--nnode-rank=1", "train.py"])
    assert ended.value.code == 2
    assert "rallyrun: error: " in capsys.readouterr().err


def test_a_deleted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("PWD", os.fspath(gone))
    assert main(["launch", HOSTS, *RALLYRUN]) == 2
    assert (
        "the working folder of this command no longer exists (No such file or directory); set another one with --chdir"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        (["rallyrun", "t.py"], {}, LaunchedCommand(2, 2)),
        (["/opt/bin/rallyrun", "--nnodes=1:2", "t.py"], {}, LaunchedCommand(1, 2)),
        (["rallyrun", "t.py"], {"PET_NNODES": "1:4"}, LaunchedCommand(1, 4)),
        (["rallyrun", "--standalone", "t.py"], {}, LaunchedCommand()),
        (["rallyrun", "--rdzv-endpoint=x:1", "t.py"], {}, LaunchedCommand(2, 2, True)),
        (["rallyrun", "t.py"], {"PET_RDZV_ENDPOINT": "x:1"}, LaunchedCommand(2, 2, True)),
        (["sh", "-c", "rallyrun --nnodes=9 t.py"], {}, LaunchedCommand()),
    ],
)
def test_read_command(command: list[str], variables: dict[str, str], expected: LaunchedCommand) -> None:
    assert read_command(command, variables, 2) == expected
