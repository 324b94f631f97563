"""The completion scripts, in each shell."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import pytest

from rallypoint.cli import completion
from rallypoint.cli.completion import SHELLS, completion_script
from rallypoint.cli.parse import PrintCompletion, parse
from rallypoint.cli.parse import build_parser as build_launcher
from rallypoint.cli.rallyctl import build_parser, main
from tests.processes import completed

pytestmark = pytest.mark.process

_BASH = """
source ./script
complete_line() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    _shtab_$1; echo "${COMPREPLY[*]}"
}
complete_line rallyrun --rdzv-b
complete_line rallyctl sta
complete_line rallyrun --start-method forks
"""
_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -d -f -i
zpty -w shell 'PS1=; unsetopt beep; fpath=($PWD $fpath); autoload -Uz compinit && compinit -u -D'
zpty -w shell 'show() { print -r -- "<$BUFFER>"; BUFFER= }; zle -N show; bindkey -e; bindkey "^Xp" show'
zpty -w shell 'print read''y'; zpty -r shell text '*ready*'
for line in 'rallyrun --rdzv-b' 'rallyctl statu' 'rallyrun --start-method forks'; do
    zpty -n -w shell "$line"$'\t\x18p'
    zpty -r shell text '*<rally*>*'
    text=${text##*<}; print -r -- ${text%%>*}
done
"""
_FISH = """
source ./script
complete -C 'rallyrun --rdzv-b'
complete -C 'rallyctl statu'
complete -C 'rallyrun --start-method forks'
"""
_TCSH = """
source ./script
complete rallyrun
complete rallyctl
"""
SHELL_INPUT = {
    "bash": (["bash", "--norc"], _BASH, ["--rdzv-backend", "status stacks", "forkserver"]),
    "zsh": (["zsh", "-f"], _ZSH, ["rallyrun --rdzv-backend", "rallyctl status", "rallyrun --start-method forkserver"]),
    "fish": (["fish", "--no-config"], _FISH, ["--rdzv-backend", "status", "forkserver"]),
    "tcsh": (["tcsh", "-f"], _TCSH, ["rdzv-backend", "fork forkserver", "status"]),
}
"""Shells to their command, input, and parts of their output in this order."""


def both() -> dict[str, argparse.ArgumentParser]:
    return {"rallyrun": build_launcher(), "rallyctl": build_parser()}


@pytest.mark.parametrize("shell", SHELLS)
def test_flags_verbs_and_values_are_completed(shell: str, tmp_path: Path) -> None:
    command, text, wanted = SHELL_INPUT[shell]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{shell} is not installed")
    for name in ("script", "_rallyrun"):
        (tmp_path / name).write_text(completion_script(shell, both()))
    done = completed(command, input=text, cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.stderr == ""
    at = 0
    for part in wanted:
        at = done.stdout.find(part, at) + 1
        assert at, f"{part!r} is not at its place in {done.stdout!r}"


def test_the_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == completion_script("fish", both()).rstrip("\n") + "\n"
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "install shtab" in capsys.readouterr().err
    monkeypatch.setattr(completion, "PACKAGED", tmp_path)
    (tmp_path / "bash").write_text("the script of a wheel\n")
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == "the script of a wheel\n"


@pytest.mark.parametrize("flag", [["--print-completion", "bash"], ["--print_completion=bash"]])
def test_the_launcher_s_flag(
    flag: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (action,) = [action for action in build_launcher()._actions if isinstance(action, PrintCompletion)]
    assert set(action.choices or ()) == SHELLS.keys()
    for called, name in (("/usr/bin/torchrun", "torchrun"), ("/usr/bin/rallyrun", "rallyrun"), ("-m", "rallyrun")):
        monkeypatch.setattr("sys.argv", [called])
        with pytest.raises(SystemExit) as ended:
            parse(flag, {})
        assert ended.value.code == 0
        script = capsys.readouterr().out
        assert script == completion_script("bash", {name: build_launcher()}).rstrip("\n") + "\n"
        assert f" -F _shtab_{name} {name}\n" in script
    monkeypatch.setattr(completion, "PACKAGED", tmp_path)
    (tmp_path / "bash").write_text("the script of the installation\n")
    with pytest.raises(SystemExit):
        parse(flag, {})
    assert capsys.readouterr().out == "the script of the installation\n"
    monkeypatch.setattr("sys.argv", ["torchrun"])
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        parse(flag, {})
    assert ended.value.code == 1
    assert re.fullmatch(r".*--print.completion=bash: .*install shtab.*\n", capsys.readouterr().err)
