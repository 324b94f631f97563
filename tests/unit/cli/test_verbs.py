"""Verbs of `rallyctl`: refusals and output."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.secrets import job_secret
from rallypoint.cli.convert import check_script
from rallypoint.cli.parse import parse
from rallypoint.cli.rallyctl import main
from rallypoint.cli.verbs import GROUPS, VERBS
from rallypoint.rendezvous.handler import LocalJob


@pytest.mark.parametrize("name", ["every", "within", "times"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_drill_limits(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "times" and not value.lstrip("-").isdecimal():
        return  # not an integer
    assert main(["drill", "127.0.0.1:1", "--kill=worker", f"--{name}={value}"]) == 2
    assert f"--{name}={value} is out of range; set it to more than 0" in capsys.readouterr().err


def test_the_example_of_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, example),) = next(verb.examples for verb in VERBS if verb.name == "secret")
    former = os.umask(0)
    try:
        assert main(["secret", *example.split()]) == 0
    finally:
        os.umask(former)
    (made,) = tmp_path.iterdir()
    monkeypatch.setattr("rallypoint.base.secrets._taken", {})
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(made))
    assert job_secret() is not None
    assert capsys.readouterr().out == ""
    before = made.read_text()
    assert main(["secret", *example.split()]) == 1
    assert re.search("cannot be created: File exists; choose another", capsys.readouterr().err)
    assert made.read_text() == before


@pytest.mark.parametrize(("name", "similar"), [("trian.py", "train.py"), ("nosuch.py", ""), ("x.py", "")])
def test_similar_scripts_are_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, similar: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for script in ("train.py", "loop.py", "a.py"):
        (tmp_path / script).touch()
    with pytest.raises(UserError) as refused:
        check_script(parse([name], {}), {})
    assert str(refused.value).endswith(f"did you mean {similar}?" if similar else "check the path")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["status", "--nodee=3"], "unknown flag --nodee; did you mean --node? 'rallyctl status --help' lists all"),
        (["--foo", "status"], "unknown flag --foo; 'rallyctl status --help' lists all"),
        (["stauts"], "unknown verb 'stauts'; did you mean status? 'rallyctl --help' lists all"),
        (["qqq"], "unknown verb 'qqq'; 'rallyctl --help' lists all"),
        (["stop", "a", "b"], "unexpected argument 'b'; see 'rallyctl stop --help'"),
    ],
)
def test_unknown_words(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err.splitlines()[-1] == f"rallyctl: error: {sentence}"


@pytest.mark.parametrize("words", [["stop", "$SLURM_JOB_ID"], ["status", "node1:29400", "--rdzv-id=${X}"]])
def test_unexpanded_variables(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "which was not expanded" in capsys.readouterr().err


def test_rallyctl_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert [verb.name for verb in VERBS if f"\n  {verb.name} " not in shown] == []
    assert [group for group in GROUPS if f"\n{group}:\n" not in shown] == []


@pytest.mark.parametrize(
    "words", [["stop"], ["restart"], ["drain", "0"], ["resize", "1:2"], ["drill", "--kill=worker"]]
)
def test_changing_verbs_need_a_job(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = LocalJob(4711, "elastic7", "c10d", "127.0.0.1:1", "train.py", time.time(), os.geteuid())
    monkeypatch.setattr("rallypoint.cli.local_jobs.local_jobs", lambda: [job])
    for name in ("RALLYPOINT_ENDPOINT", "PET_RDZV_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert main(words) == 2
    head, *rows = capsys.readouterr().err.splitlines()
    assert head == f"rallyctl: error: select the job to {words[0]} by its number, id, port or script:"
    assert rows[1].split()[:3] == ["4711", "elastic7", "train.py"]
