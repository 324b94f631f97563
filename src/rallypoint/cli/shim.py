"""`rallyctl shim`: redirects torch's launcher to Rallypoint, in an environment or for one command.

In an environment, our program replaces its `torchrun`. A `.pth` file and a module next to it redirect imports of
torch's launcher to `rallypoint.compat.shim`. For one command, a folder with the same files is prepended to `PATH` and
`PYTHONPATH`. Both work with any version of Rallypoint; if it is missing, torch works as without the shim.

Laws:

1. Write only these three files, bytecode of the module, and a copy of torch's own `torchrun` next to ours.
2. Replace files atomically. After each step a launch works, with torch's launcher or ours.
3. `off` restores the files that `on` found. It does not touch files that were installed later (a newer torch).
4. Refuse an environment that others share.
"""

from __future__ import annotations

import argparse
import os
import py_compile
import shlex
import shutil
import sys
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.base.private_files import replace_file
from rallypoint.base.procfs import read_text
from rallypoint.cli.exit import print_answer

_SWITCH = "RALLYPOINT_SHIM"
_PYTHON = "RALLYPOINT_SHIM_PYTHON"
"""Names the Python that contains Rallypoint, for the `torchrun` of `shim run`."""
_FOLDER = Path(__file__).with_name("shim_path")
"""The folder to prepend to `PATH` and `PYTHONPATH`. Also contains the sources of the files for an environment."""
_OFF = 3
"""Exit code of `status` if the shim is off."""
_LONGEST_SHEBANG = 127
"""How many bytes of a script's first line every Linux reads."""


def shim(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.action == "run":
        return _run(command)
    if command:
        raise UsageError(f"rallyctl shim {options.action} takes no command; remove {shlex.join(command)}")
    environment = _Environment()
    if options.action == "status":
        print_answer("\n".join(environment.lines()))
        return 0 if environment.is_on else _OFF
    if reason := environment.refusal():
        raise UserError(f"{reason}; to redirect one command, use rallyctl shim run -- COMMAND")
    try:
        if options.action == "on":
            environment.switch_on()
        else:
            environment.switch_off()
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be written: {error.strerror}; check the state with rallyctl shim status"
        ) from None
    print_answer("\n".join(environment.lines()))
    return 0


def _run(command: list[str]) -> int:
    """Replace this process with a command under the shim."""
    if not command:
        raise UsageError("the command is missing; write it after --: rallyctl shim run -- accelerate launch train.py")
    if not os.access(_FOLDER / "torchrun", os.X_OK):  # otherwise the shell would run torch's own `torchrun`
        raise UserError(f"{_FOLDER / 'torchrun'} is not executable; reinstall Rallypoint, or run chmod +x on this file")
    for name, default in (("PATH", os.defpath), ("PYTHONPATH", "")):
        others = os.environ.get(name, default)
        os.environ[name] = os.pathsep.join([str(_FOLDER), *([others] if others else [])])
    os.environ[_PYTHON] = sys.executable
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise RallypointError(f"{command[0]} cannot be started: {error.strerror}; check the command") from None


class _Environment:
    """The environment of the Python that is running this command."""

    def __init__(self) -> None:
        self._prefix = Path(sys.prefix)
        self._torchrun = Path(sysconfig.get_path("scripts"), "torchrun")
        self._kept = self._torchrun.with_name("torchrun-torch")
        self._hook = Path(sysconfig.get_path("purelib"), "rallypoint-shim.pth")
        self._module = self._hook.with_name("rallypoint_shim.py")

    @property
    def _kind(self) -> str:
        """The kind; empty for the system's Python, or another that is installed for all users."""
        if sys.prefix != sys.base_prefix:
            return "virtual environment"
        shared = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
        return "conda environment" if not shared and (self._prefix / "conda-meta").is_dir() else ""

    def refusal(self) -> str:
        """Why this environment must not be changed; empty if it belongs to the user."""
        if not self._kind:
            return f"{self._prefix} is not a virtual environment, but a Python that all programs share"
        owner = self._prefix.stat().st_uid
        if owner != os.geteuid():
            return f"the environment {self._prefix} belongs to {_user(owner)}, not to {_user(os.geteuid())}"
        for folder in (self._torchrun.parent, self._hook.parent):
            if not os.access(folder, os.W_OK | os.X_OK):
                return f"the environment {self._prefix} is read-only: {folder} cannot be written to"
        return ""

    @property
    def is_on(self) -> bool:
        copied = all(read_text(str(file)) == read_text(str(_FOLDER / file.name)) for file in (self._module, self._hook))
        return copied and read_text(str(self._torchrun)) == self._script()

    def lines(self) -> list[str]:
        """Describe the state of the shim."""
        ours, hook = _is_ours(self._torchrun), self._hook.exists()
        state = "on" if self.is_on else "partly on: 'rallyctl shim on' completes it" if ours or hook else "off"
        rows = [
            ("shim", state),
            ("python", f"{sys.executable} ({self._kind or 'installed for all'})"),
            ("torchrun", f"{self._torchrun} {self._owner_sentence(ours)}"),
            (
                "imports",
                "torch.distributed.run, .launch and .launcher are " + ("Rallypoint's" if hook else "torch's own"),
            ),
        ]
        if hook:
            rows.append(("", f"by {self._hook}"))
        if os.environ.get(_SWITCH) == "0":
            rows.append(("now", f"{_SWITCH}=0 is set: programs started here still use torch's own"))
        if not ours and not hook and (reason := self.refusal()):
            rows.append(("refused", reason))
        return [f"{name:<8}  {text}" for name, text in rows]

    def _owner_sentence(self, ours: bool) -> str:
        if not self._torchrun.exists():
            return "does not exist"
        if not ours:
            return "is torch's own"
        return "is Rallypoint's; " + (f"torch's own is {self._kept.name}" if self._kept.exists() else "there was none")

    def switch_on(self) -> None:
        """Install our files."""
        if not _is_ours(self._torchrun):
            if self._torchrun.exists():  # a newer torch may have been installed
                new = self._kept.with_name(f".{self._kept.name}-new")
                shutil.copy2(self._torchrun, new)
                new.replace(self._kept)
            else:
                self._kept.unlink(missing_ok=True)
        _write(self._torchrun, self._script(), 0o755)
        _write(self._module, read_text(str(_FOLDER / self._module.name)), 0o644)
        py_compile.compile(str(self._module), quiet=2)  # otherwise each Python without write access would
        _write(self._hook, read_text(str(_FOLDER / self._hook.name)), 0o644)

    def switch_off(self) -> None:
        """Restore the original files."""
        for file in (self._hook, self._module, Path(cache_from_source(str(self._module)))):
            file.unlink(missing_ok=True)
        if not _is_ours(self._torchrun):
            self._kept.unlink(missing_ok=True)
        elif self._kept.exists():
            self._kept.replace(self._torchrun)
        else:
            self._torchrun.unlink()

    def _script(self) -> str:
        """Our `torchrun` for this Python."""
        lines = (_FOLDER / "torchrun").read_text().splitlines(keepends=True)
        simple = f"#!{sys.executable}\n"
        if len(os.fsencode(simple)) <= _LONGEST_SHEBANG and not any(map(str.isspace, sys.executable)):
            return "".join([simple, *lines[3:]])
        shell, _, end = lines[:3]
        return "".join([shell, f"'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n", end, *lines[3:]])


def _is_ours(torchrun: Path) -> bool:
    return "from rallypoint." in read_text(str(torchrun))


def _user(number: int) -> str:
    from pwd import getpwuid

    try:
        return getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _write(path: Path, text: str, mode: int) -> None:
    """Replace a file, with a mode that does not depend on the umask."""
    replace_file(str(path), text.encode(), mode=mode)
    path.chmod(mode)
