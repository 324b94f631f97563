"""Shells that are asked what they complete.

bash and zsh run on a terminal of their own and get keys as from a person; a key that is bound to it hands back the line
that is being written, through a pipe, and empties it. fish has a command for the question.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

DEADLINE = 100.0
"""Seconds for whatever a shell is to do: far more than it takes, for other tests run too."""

_ALL, _HAND_BACK, _TAB = b"\x18\x01", b"\x18\x10", b"\t"
_PROMPT = b"READY> "

_BASHRC = r"""
PS1='READY> ' PS2= HISTFILE=
bind 'set completion-query-items 0'
bind '"\C-x\C-a": insert-completions'
hand_back() { printf '%s\0' "$READLINE_LINE" >&9; READLINE_LINE='' READLINE_POINT=0; }
bind -x '"\C-x\C-p": hand_back'
source SCRIPT
"""

_ZSHRC = r"""
PS1='READY> ' PS2= HISTFILE=
unsetopt beep
fpath=(FOLDER $fpath)
autoload -Uz compinit && compinit -u -D
zstyle ':completion:*' list-prompt ''
unset zle_bracketed_paste
insert-all() { _main_complete; compstate[insert]=all; compstate[list]= }
zle -C insert-all complete-word insert-all
hand-back() { print -rN -u 9 -- "$BUFFER"; BUFFER= }
zle -N hand-back
bindkey -e
bindkey '^X^A' insert-all
bindkey '^X^P' hand-back
"""


class Shell(Protocol):
    """A shell in a folder, which has read the completion script. A Python that it starts leaves a file in `home`."""

    home: Path

    def every(self, line: str) -> set[str]:
        """What completes the last word of a line, as far as it follows the last of `= , : @` that was typed."""

    def close(self) -> None:
        """End it."""


class OnTerminal:
    """bash or zsh."""

    def __init__(self, command: list[str], folder: Path, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self._terminal, theirs = pty.openpty()
        self._lines, writing = os.pipe()
        self._shown = b""
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec 9>&{writing} {writing}>&-; exec "$@"', "bash", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment | {"TERM": "vt100", "COLUMNS": "10000", "LINES": "1000"},
            start_new_session=True,
            pass_fds=(writing,),
        )
        os.close(theirs)
        os.close(writing)
        self._wait(lambda: _PROMPT in self._shown)

    def every(self, line: str) -> set[str]:
        return _ends(self._ask(line, _ALL), line)

    def tab(self, line: str) -> str:
        """The line after TAB."""
        return self._ask(line, _TAB)

    def close(self) -> None:
        self._process.send_signal(signal.SIGHUP)
        try:
            self._process.wait(DEADLINE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._terminal)
            os.close(self._lines)

    def _ask(self, line: str, key: bytes) -> str:
        answer = b""

        def is_whole() -> bool:
            nonlocal answer
            while select.select([self._lines], [], [], 0)[0]:
                part = os.read(self._lines, 65536)
                assert part, "the shell has ended"
                answer += part
            return answer.endswith(b"\0")

        os.write(self._terminal, line.encode() + key + _HAND_BACK)
        self._wait(is_whole)
        return answer.rstrip(b"\0").decode()

    def _wait(self, is_there: object) -> None:
        """Read what the shell shows, so that it goes on, until something is there."""
        assert callable(is_there)
        end = time.monotonic() + DEADLINE
        while not is_there():
            left = end - time.monotonic()
            assert left > 0, f"the shell does not answer; it has shown {self._shown[-2000:]!r}"
            if self._terminal in select.select([self._terminal, self._lines], [], [], left)[0]:
                self._shown += os.read(self._terminal, 65536)


class Fish:
    """fish, a new one for each question."""

    def __init__(self, script: Path, folder: Path, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self._script, self._folder, self._environment = script, folder, environment

    def every(self, line: str) -> set[str]:
        asked = 'source $argv[1]; complete -C "$argv[2]"'
        command = ["fish", "--no-config", "-c", asked, str(self._script), line]
        done = subprocess.run(
            command,
            check=True,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.stderr == ""
        found = [each.partition("\t")[0] for each in done.stdout.splitlines()]
        return {_end(each, _word(line)) for each in found}

    def close(self) -> None:
        """Nothing is left."""


def start(name: str, script: str, folder: Path, home: Path) -> Shell:
    """A shell that has read the script.

    Args:
        name: bash, zsh or fish.
        script: what `rallyctl completion` prints.
        folder: where it is.
        home: an empty folder.
    """
    programs = home / "programs"
    programs.mkdir()
    for each in ("rallyrun", "rallyctl", "python", "python3"):
        (programs / each).write_text(f"#!/bin/sh\n: > {home}/started-{each}\n")
        (programs / each).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {"HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8", "RALLYPOINT_TEST_OF_SHELLS": "1"}
    file = home / "_rallyrun"
    file.write_text(script)
    if name == "fish":
        return Fish(file, folder, home, environment)
    if name == "zsh":
        (home / ".zshrc").write_text(_ZSHRC.replace("FOLDER", str(home)))
        return OnTerminal(["zsh", "-d", "-i"], folder, home, environment | {"ZDOTDIR": str(home)})
    (home / "bashrc").write_text(_BASHRC.replace("SCRIPT", str(file)))
    return OnTerminal(["bash", "--noprofile", "--rcfile", str(home / "bashrc"), "-i"], folder, home, environment)


def _ends(completed: str, line: str) -> set[str]:
    """The words that the shell has put for the last one of a line."""
    word = _word(line)
    return {_end(each, word) for each in completed[len(line) - len(word) :].replace("\\", "").split()} - {"", word}


def _word(line: str) -> str:
    return line.rpartition(" ")[2]


def _end(candidate: str, word: str) -> str:
    """What a candidate adds to a word behind the last sign that separates parts of it; shells repeat more or less.

    The underscores of a flag may have become dashes.
    """
    candidate, word = _dashed(candidate), _dashed(word)
    cut = max(word.rfind(sign) for sign in "=,:@") + 1
    start = next(start for start in range(cut + 1) if candidate.startswith(word[start:cut]))
    return candidate[cut - start :].rstrip("./")


def _dashed(word: str) -> str:
    flag, equals, value = word.partition("=")
    return (flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value
