"""The start of workers under tools that replace functions of `os` and `subprocess`.

The tools are imitated here, and real in tests/jobs/test_tools.py.
"""

from __future__ import annotations

import functools
import logging
import os
import posix
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.kernel import check_kernel
from rallypoint.workers.patched_start import as_patched
from rallypoint.workers.process import start_workers
from rallypoint.workers.reaper.client import Command, ReaperClient
from tests.unit.workers.test_process import guarded

pytestmark = pytest.mark.process

COMMANDS = [Command(["python", "-u", "train.py", rank], {"RANK": rank}, cpus=(0,)) for rank in "01"]
ENV = {"PATH": "/bin", "COMMON": "1", "OLD": "1"}


@pytest.fixture
def debugger(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces `os.posix_spawn` as pydevd does; the result lists the workers that it has seen."""
    seen = []

    def posix_spawn(path: str, argv: list[str], env: Mapping[str, str], **more: Any) -> int:
        seen.append(argv[-1])
        return posix.posix_spawn(path, [*argv[:2], "pydevd.py", "--file", *argv[2:]], env, **more)

    monkeypatch.setattr(os, "posix_spawn", posix_spawn)
    return seen


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `Popen.__init__` as viztracer (arguments) and monitors (variables) do."""
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def init(self: Any, args: Sequence[str], **more: Any) -> None:
        more["env"] = {**more["env"], "TRACE": "7"}
        del more["env"]["OLD"]
        original(self, [args[0], "-m", "viztracer", "--", *args[1:]], **more)

    monkeypatch.setattr(subprocess.Popen, "__init__", init)


def test_without_a_tool_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_patched(COMMANDS, ENV) == (COMMANDS, ENV)
    monkeypatch.setitem(sys.modules, "subprocess", types.ModuleType("subprocess"))  # another thread imports it
    assert as_patched(COMMANDS, ENV) == (COMMANDS, ENV)


def test_a_debugger_changes_the_arguments_of_each_worker(debugger: list[str]) -> None:
    commands, env = as_patched(COMMANDS, ENV)
    patched = ["python", "-u", "pydevd.py", "--file", "train.py"]
    assert commands == [command._replace(argv=[*patched, rank]) for command, rank in zip(COMMANDS, "01", strict=True)]
    assert env == ENV
    assert debugger == ["0", "1"]


def test_a_tracer_changes_arguments_and_variables(tracer: None, debugger: list[str]) -> None:
    commands, env = as_patched(COMMANDS, ENV)
    assert commands[0].argv == ["python", "-m", "pydevd.py", "--file", "viztracer", "--", "-u", "train.py", "0"]
    assert env == {"PATH": "/bin", "COMMON": "1", "TRACE": "7"}
    assert [command.variables for command in commands] == [{"RANK": "0"}, {"RANK": "1"}]


def test_the_reaper_starts_the_changed_commands(monkeypatch: pytest.MonkeyPatch, debugger: list[str]) -> None:
    asked = []
    monkeypatch.setattr(ReaperClient, "spawn", lambda _, *request: asked.append(request))
    with guarded() as reaper:
        assert debugger == []  # it has not seen the reaper
        start_workers(reaper, COMMANDS, ENV)
    ((commands, env, _),) = asked
    assert "pydevd.py" in commands[0].argv
    assert env == ENV


def fails(*_: object, **__: object) -> int:
    raise KeyError("state")


UNSEEN = "'python' starts without the debugger or tracer of this process, which fails with KeyError: 'state'"


@pytest.mark.parametrize(
    ("module", "name", "replacement", "why"),
    [
        (os, "posix_spawn", fails, UNSEEN),
        (os, "posix_spawn", lambda *_: 0, "its os.posix_spawn does not call Python's"),
        (subprocess, "Popen", types.SimpleNamespace, "its subprocess.Popen is not derived from Python's"),
    ],
)
def test_tools_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: types.ModuleType,
    name: str,
    replacement: object,
    why: str,
) -> None:
    monkeypatch.setattr(module, name, replacement)
    with caplog.at_level(logging.WARNING, "rallypoint"):
        assert as_patched(COMMANDS[:1], ENV)[0][0].argv == COMMANDS[0].argv
    (line,) = caplog.messages
    assert why in line


def test_gevent_in_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkey = types.ModuleType("gevent.monkey")
    monkeypatch.setattr(monkey, "is_module_patched", {"threading", "select"}.__contains__, raising=False)
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    monkeypatch.setattr("rallypoint.base.kernel._checked", False)
    with pytest.raises(UserError, match=r"^gevent has replaced threading, select in this process"):
        check_kernel()
    monkeypatch.setattr(monkey, "is_module_patched", lambda _: False)
    check_kernel()
