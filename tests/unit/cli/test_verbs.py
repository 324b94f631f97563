"""What verbs of `rallyctl` refuse before they do anything, and what they write."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.secrets import job_secret
from rallypoint.cli.convert import check_script
from rallypoint.cli.parse import parse
from rallypoint.cli.rallyctl import VERBS, main


@pytest.mark.parametrize("name", ["every", "within", "times"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_drill_needs_numbers_that_can_be_waited_for(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "times" and not value.lstrip("-").isdecimal():
        return  # that is no whole number
    assert main(["drill", "127.0.0.1:1", "--kill=worker", f"--{name}={value}"]) == 2
    assert f"--{name}={value} is out of range; give more than 0" in capsys.readouterr().err


def test_the_example_of_a_secret_makes_one_that_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = next(verb.example for verb in VERBS if verb.name == "secret")
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
    assert re.search("cannot be made: File exists; name another", capsys.readouterr().err)
    assert made.read_text() == before


@pytest.mark.parametrize(("name", "meant"), [("trian.py", "train.py"), ("nosuch.py", ""), ("x.py", "")])
def test_a_script_is_suggested_only_if_its_name_is_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("train.py", "loop.py", "a.py"):
        (tmp_path / each).touch()
    with pytest.raises(UserError) as refused:
        check_script(parse([name], {}), {})
    assert str(refused.value).endswith(f"did you mean {meant}?" if meant else "check the path")
