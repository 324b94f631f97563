"""Runs a page as a reader would: its blocks in order, in terminals that live as long as the page.

1. The commands of a block with several terminals start in all of them at once.
2. A command that still runs at the end of a block goes on; a later block shows its next output, or the reader presses
   ^C at the end of the page.
3. Every error names the line of the page.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.documents.blocks import Block, Command, Hidden, Page
from tests.documents.compare import ends, without_blank_ends
from tests.documents.settings import Surroundings
from tests.documents.shells import Shell
from tests.jobs.launching import TIMEOUT, Launcher
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
INTERRUPT = "^C"
_LINES_OF_A_FAILURE = 80

_PORT = re.compile(r"(?<![\d.])29\d{3}(?!\d)")
"""Ports that pages name. On a machine that tests share each stands for a free one."""


class Names:
    """What a page calls by another name: in commands and files it becomes ours, in output ours becomes the page's."""

    def __init__(self, names: Mapping[str, str], home: Path, *, shares_machine: bool) -> None:
        self._real = dict(names)
        self._shown = {
            str(home): "/home/you",
            str(ROOT): "/home/you/rallypoint",
            sys.prefix: "/home/you/venv",
            **{real: shown for shown, real in self._real.items() if "$" not in real},
        }
        self._shares_machine = shares_machine
        self._ports: dict[str, str] = {}

    def real(self, text: str) -> str:
        """A text of the page as it is run."""
        for shown, real in self._real.items():
            text = text.replace(shown, real)
        return _PORT.sub(lambda match: self._port(match[0]), text) if self._shares_machine else text

    def shown(self, line: str) -> str:
        """A line of output as the page shows it."""
        for real, shown in self._shown.items():
            line = line.replace(real, shown)
        for shown, real in self._ports.items():
            line = re.sub(rf"(?<!\d){real}(?!\d)", shown, line)
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node0", line) if self._shares_machine else line

    def _port(self, shown: str) -> str:
        return self._ports.setdefault(shown, str(free_port()))


class PageRun:
    """The terminals of a page, and how far each is."""

    def __init__(self, page: Page, launcher: Launcher, around: Surroundings) -> None:
        """Nothing is started yet."""
        self._page = page
        self._launcher = launcher
        home = launcher.folder / "home"
        self._folder = home / "work"
        self._folder.mkdir(parents=True)
        self._names = Names({**page.stands_for, **around.names}, home, shares_machine=not around.entries)
        self._entries = around.entries
        programs = [around.env.get("PROGRAMS", ""), str(Path(sys.executable).parent), os.environ["PATH"]]
        path = os.pathsep.join(filter(None, programs))
        self._env = {
            "HOME": str(home),
            "PATH": path,
            "CHECKOUT": str(ROOT),
            "VENV": sys.prefix,
            "PAGER": "cat",
            **around.env,
        }
        self._shells: dict[str, Shell] = {}
        self._seen: dict[str, int] = {}

    def run(self) -> None:
        """Run all steps, and end what is still running then.

        Raises:
            AssertionError: something came that the page does not show, or did not come.
        """
        try:
            for terminal in self._page.terminals:
                self._shell(terminal)
            for step in self._page.steps:
                if isinstance(step, Hidden):
                    self._hidden(step)
                elif "file" in step.says:
                    self._write(step)
                elif step.is_run:
                    self._block(step)
        finally:
            self._end()

    def _shell(self, name: str) -> Shell:
        if name not in self._shells:
            entry = self._entries.get(name, [])
            self._shells[name] = Shell(self._launcher, str(self._folder), self._env, entry)
            self._seen[name] = 0
        return self._shells[name]

    def _write(self, block: Block) -> None:
        path = self._folder / block.says["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._names.real(block.text))

    def _hidden(self, step: Hidden) -> None:
        shell = self._shell(self._page.terminals[0])
        shell.type(self._names.real(step.text))
        code = shell.ends()
        assert code == 0, self._wrong(step.line, step.text, f"exit status {code}", [], shell.lines)

    def _block(self, block: Block) -> None:
        if block.shown:
            self._goes_on(block)
        by_terminal: dict[str, list[tuple[Command, int]]] = {}
        for command, code in zip(block.commands, block.codes, strict=False):
            by_terminal.setdefault(command.terminal, []).append((command, code))
        if len(by_terminal) < 2:
            for commands in by_terminal.values():
                self._commands(block, commands)
            return
        with ThreadPoolExecutor(len(by_terminal)) as pool:
            list(pool.map(lambda commands: self._commands(block, commands), by_terminal.values()))

    def _commands(self, block: Block, commands: list[tuple[Command, int]]) -> None:
        for number, (command, code) in enumerate(commands, 1):
            shell = self._shells[command.terminal]
            if shell.running:
                self._prompt_is_back(command)
            shell.type(self._names.real(command.text))
            self._seen[command.terminal] = 0
            on = number == len(commands) and self._stays(block, command.terminal)
            self._compare(block, command, code, goes_on=on)

    def _prompt_is_back(self, command: Command) -> None:
        """Wait until what is still running has ended, as who types the next command has to."""
        code = self._shells[command.terminal].ends()
        if code is None or (code != 0 and command.text != "echo $?"):
            what = "what ran here has not ended" if code is None else f"what ran here ended with status {code}"
            raise AssertionError(self._wrong(command.line, command.text, what, [], self._came(command.terminal)))

    def _goes_on(self, block: Block) -> None:
        """What a block shows before its first command, of a command that an earlier block has begun."""
        running = [name for name, shell in self._shells.items() if shell.running]
        name = block.says.get("terminal", running[0] if len(running) == 1 else "")
        if name not in running:
            what = f"of those that run, which? {running}" if running else "no command is running that writes this"
            raise AssertionError(self._wrong(block.line, "(output)", what, list(block.shown), []))
        command = Command(block.line, f"(what goes on in the terminal {name!r})", block.shown, name)
        code = 0 if block.commands else block.codes[0]
        self._compare(block, command, code, goes_on=not block.commands and self._stays(block, name))

    @staticmethod
    def _stays(block: Block, terminal: str) -> bool:
        named = block.says.get("still running")
        return named is not None and (not named or terminal in named.replace(",", " ").split())

    def _compare(self, block: Block, command: Command, code: int, *, goes_on: bool) -> None:
        shell = self._shells[command.terminal]
        shown = list(command.output)
        while INTERRUPT in shown:
            before, shown = shown[: shown.index(INTERRUPT)], shown[shown.index(INTERRUPT) + 1 :]
            self._until(block, command, before)
            shell.interrupt()
        if goes_on:
            self._until(block, command, shown)
            return
        ended = shell.ends()
        came = self._came(command.terminal)
        if ended is None:
            raise AssertionError(self._wrong(command.line, command.text, f"no end in {TIMEOUT:.0f} s", shown, came))
        lines = without_blank_ends(came)
        if shown or block.compares:
            reached = _ends(without_blank_ends(shown), lines, block)
            if len(lines) not in reached:
                raise AssertionError(self._wrong(command.line, command.text, "other output", shown, came))
        if ended != code:
            raise AssertionError(
                self._wrong(command.line, command.text, f"exit status {ended}, not {code}", shown, came)
            )

    def _until(self, block: Block, command: Command, shown: list[str]) -> None:
        """Wait until what is shown has come, of a command that goes on."""
        name = command.terminal
        wanted = without_blank_ends(shown)

        def reached(lines: list[str]) -> set[int]:
            return _ends(wanted, [self._names.shown(line) for line in lines[self._seen[name] :]], block)

        if wanted and not self._shells[name].until(lambda lines: bool(reached(lines))):
            code = self._shells[name].ends(0)
            what = f"not in {TIMEOUT:.0f} s" if code is None else f"ended before that, with status {code}"
            raise AssertionError(self._wrong(command.line, command.text, what, shown, self._came(name)))
        shell = self._shells[name]
        self._seen[name] = min(self._seen[name] + min(reached(shell.lines), default=0), shell.finished)

    def _came(self, name: str) -> list[str]:
        return [self._names.shown(line) for line in self._shells[name].lines[self._seen[name] :]]

    def _wrong(self, line: int, command: str, what: str, shown: list[str], came: list[str]) -> str:
        return (
            f"{self._page.name}:{line}: {what}\n  $ {command}\n  the page shows:\n{_indented(shown)}"
            f"  this came:\n{_indented(came)}"
        )

    def _end(self) -> None:
        """Press ^C wherever something still runs, and close the terminals."""
        running = [shell for shell in self._shells.values() if shell.running]
        for shell in running:
            shell.interrupt()
        left = [shell for shell in running if shell.ends() is None]
        for shell in self._shells.values():
            if shell not in left:
                shell.close()
        assert not left, f"{self._page.name}: a command did not end by ^C: {[shell.lines for shell in left]}"


def _indented(lines: list[str]) -> str:
    if len(lines) > _LINES_OF_A_FAILURE:
        half = _LINES_OF_A_FAILURE // 2
        lines = [*lines[:half], f"({len(lines) - 2 * half} lines more)", *lines[-half:]]
    return "".join(f"    {each}\n" for each in lines)


def _ends(shown: list[str], came: list[str], block: Block) -> set[int]:
    return ends(shown, came, block.says.get("varies", ""), any_order="any order" in block.says)
