"""Applies changes by tools in this process to workers' commands: debuggers, tracers and monitors replace
`subprocess.Popen` or `os.posix_spawn` to follow child processes.

No tool sees the reaper start the workers. So each command first goes through `subprocess.Popen`, like torchrun's, but
is stopped at the system call. The reaper starts the command that arrives there.

Laws:

1. Nothing is started here.
2. If a tool fails, only the tool loses sight of the worker: the worker still starts.
"""

from __future__ import annotations

import os
import posix
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType

from rallypoint.base.light_typing import Any
from rallypoint.base.log import get_logger
from rallypoint.workers.reaper.client import Command

log = get_logger(__name__)


def as_patched(commands: Sequence[Command], env: Mapping[str, str]) -> tuple[Sequence[Command], Mapping[str, str]]:
    """Pass these commands and their common environment through the tools in this process. Tools that report new
    processes to their user do so now."""
    subprocess = sys.modules.get("subprocess")
    if (os.posix_spawn is posix.posix_spawn and (subprocess is None or _is_original(subprocess))) or not commands:
        return commands, env
    changed = []
    for command in commands:
        argv, environment = command.argv, {**env, **command.variables}
        try:
            argv, environment = _at_system_call(argv, environment)
        except Exception as error:
            log.warning(
                "%r starts without the debugger or tracer of this process, which fails with %s: %s",
                argv[0],
                type(error).__name__,
                error,
            )
        changed.append(command._replace(argv=argv, variables=environment))
    common = dict(set[tuple[str, str]].intersection(*(set(command.variables.items()) for command in changed)))
    return [
        command._replace(variables={name: text for name, text in command.variables.items() if name not in common})
        for command in changed
    ], common


def _is_original(subprocess: ModuleType) -> bool:
    """Whether no tool replaced `subprocess.Popen` or the way it starts processes."""
    popen = getattr(subprocess, "Popen", None)
    if popen is None:
        # The loop's thread is importing asyncio, which imports this module, and has not reached that class. No tool can
        # replace a class that does not exist yet.
        return True
    start = popen.__init__
    # Compare the dictionaries: `functools.wraps` gives a wrapper the original's module name.
    is_own = isinstance(start, FunctionType) and start.__globals__ is vars(subprocess)
    return is_own and popen.__module__ == "subprocess"


def _at_system_call(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment with which `subprocess.Popen` would start a program."""
    from subprocess import Popen

    if not hasattr(Popen, "_execute_child"):
        raise OSError("its subprocess.Popen is not derived from Python's")
    reached: list[tuple[list[str], dict[str, str]]] = []

    class Stopped(Popen[bytes]):
        def _execute_child(self, args: Sequence[str], executable: str | None, *others: Any) -> None:
            program, *rest = args
            _preexec_fn, _close_fds, _pass_fds, _cwd, env, *_ = others
            reached.append(_spawned([executable or program, *rest], env))

    Stopped(list(argv), env=dict(env))
    return reached[0]


def _spawned(argv: list[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment after any replacement of `os.posix_spawn`."""
    if os.posix_spawn is posix.posix_spawn:
        return argv, dict(env)
    _install_hook()
    _stopping.here = True
    try:
        os.posix_spawn(argv[0], argv, env)
    except _AtSystemCall as reached:
        return [os.fsdecode(argument) for argument in reached.argv], {**reached.env}
    finally:
        _stopping.here = False
    raise OSError("its os.posix_spawn does not call Python's")


class _AtSystemCall(BaseException):
    """Ends a call to `os.posix_spawn` at its audit event, the last moment before a process exists."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.argv, self.env = argv, env


class _Stopping(threading.local):
    here = False


_stopping = _Stopping()
_has_hook = False


def _install_hook() -> None:
    """Install the audit hook only when needed: Python cannot remove one."""
    global _has_hook
    if not _has_hook:
        sys.addaudithook(_on_audit)
        _has_hook = True


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.posix_spawn" and _stopping.here:
        raise _AtSystemCall(*arguments[1:])
