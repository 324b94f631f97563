"""A reader's terminal: an interactive bash that receives typed lines, and its output so far.

1. It is a real terminal, so that programs write there as they write for a reader.
2. The prompt is invisible and contains the exit status, which shows the end of a command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from tests.jobs.launching import TIMEOUT, Launcher
from tests.jobs.terminals import Terminal, plain

_PROMPT = re.compile("\x02(\\d+)\x03")
_JOB_REPORT = re.compile(r"\[\d+\][-+ ] +(Done|Exit \d+|Killed|Terminated|Stopped|Interrupt)\b")
"""What bash writes of a job in the background that has ended: before whichever prompt comes next."""
_OVERWRITTEN = re.compile(r"\r(?:\x1b\[[02]?K)?|\x1b\[2K")
"""After this a line begins anew in the same place, as one that counts the seconds does."""
_START = """
exec 0<>"$(tty)" 1>&0 2>&0
stty -echo
cd "$1" && exec bash --norc --noprofile --noediting -i
"""
"""To open the terminal makes it the controlling one, without which there would be neither jobs nor ^C."""


class Shell:
    """One terminal, in which one command runs at a time.

    Args:
        launcher: whose mark the processes bear.
        folder: where the shell begins.
        env: variables beside those of the launcher's.
        entry: what its command line begins with, to be on another host.
    """

    def __init__(self, launcher: Launcher, folder: str, env: Mapping[str, str], entry: Sequence[str] = ()) -> None:
        around = {"TERM": "xterm", "HISTFILE": "/dev/null", "VIRTUAL_ENV_DISABLE_PROMPT": "1", **env}
        # Workers of readers have no such variable either: rallyrun says what it sets in its place.
        command = [*entry, "env", "-u", "OMP_NUM_THREADS", "bash", "-c", _START, "bash", folder]
        self._terminal = Terminal(launcher, command, 120, around)
        self._begin = 0
        self.running = False
        self._terminal.write(b"PS2= PS1=$'\\002$?\\003'\n")  # a shell of root takes none from its environment
        assert self._terminal.waits(lambda _: self._over()), self._terminal.raw
        self._begin = len(self._terminal.raw)

    def type(self, text: str) -> None:
        """Begin a command."""
        assert not self.running, "a command is still running here"
        self._begin = len(self._terminal.raw)
        self._terminal.write(f"{text}\n".encode())
        self.running = True

    def interrupt(self) -> None:
        """Press ^C."""
        self._terminal.write(b"\x03")

    def until(self, holds: Callable[[list[str]], bool], timeout: float = TIMEOUT) -> bool:
        """Wait until something holds of the lines that have come, or the command has ended.

        Returns:
            Whether it holds; False if the command has ended, or so many seconds have passed, without it.
        """
        self._terminal.waits(lambda _: self._over() or holds(self.lines), timeout)
        return holds(self.lines)

    def ends(self, timeout: float = TIMEOUT) -> int | None:
        """Wait for the end of the command; returns its exit status, or None if it still runs after so many seconds."""
        if not self._terminal.waits(lambda _: self._over(), timeout):
            return None
        self.running = False
        found = _PROMPT.search(self._terminal.raw, self._begin)
        assert found is not None
        return int(found[1])

    @property
    def lines(self) -> list[str]:
        """The command's output in the terminal, the unfinished last line too, without bash's reports of other jobs."""
        raw = self._terminal.raw[self._begin :]
        prompt = _PROMPT.search(raw)
        lines = (raw[: prompt.start()] if prompt else raw).replace("\r\n", "\n").split("\n")
        shown = [plain(_OVERWRITTEN.split(line)[-1]) for line in lines]
        return [line for line in (shown if shown[-1] else shown[:-1]) if not _JOB_REPORT.match(line)]

    @property
    def finished(self) -> int:
        """How many of these lines will not change any more: all but the one that has no end yet."""
        return self._terminal.raw[self._begin :].count("\n")

    def close(self) -> None:
        """End the shell, in which no command runs any more."""
        self._terminal.write(b"exit\n")
        self._terminal.ends()

    def _over(self) -> bool:
        return _PROMPT.search(self._terminal.raw, self._begin) is not None
