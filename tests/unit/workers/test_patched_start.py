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
    """Replaces `os.posix_spawn` as pydevd does; the result is what it has told its user."""
    told = []

    def posix_spawn(path: str, argv: list[str], env: Mapping[str, str], **more: Any) -> int:
        told.append(argv[-1])
        return posix.posix_spawn(path, [*argv[:2], "pydevd.py", "--file", *argv[2:]], env, **more)

    monkeypatch.setattr(os, "posix_spawn", posix_spawn)
    return told


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


def test_without_a_tool_nothing_is_changed() -> None:
    assert as_patched(COMMANDS, ENV) == (COMMANDS, ENV)


def test_a_module_that_another_thread_is_importing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "subprocess", types.ModuleType("subprocess"))
    assert as_patched(COMMANDS, ENV) == (COMMANDS, ENV)


def test_a_debugger_sees_each_worker_and_changes_its_arguments(debugger: list[str]) -> None:
    commands, env = as_patched(COMMANDS, ENV)
    assert [command.argv for command in commands] == [
        ["python", "-u", "pydevd.py", "--file", "train.py", rank] for rank in "01"
    ]
    assert debugger == ["0", "1"]
    assert (env, [command._replace(argv=()) for command in commands]) == (
        ENV,
        [command._replace(argv=()) for command in COMMANDS],
    )


def test_a_tracer_changes_arguments_and_variables(tracer: None, debugger: list[str]) -> None:
    commands, env = as_patched(COMMANDS, ENV)
    assert commands[0].argv == ["python", "-m", "pydevd.py", "--file", "viztracer", "--", "-u", "train.py", "0"]
    assert env == {"PATH": "/bin", "COMMON": "1", "TRACE": "7"}
    assert [command.variables for command in commands] == [{"RANK": "0"}, {"RANK": "1"}]


def test_the_reaper_starts_what_the_tools_make_of_a_command(
    monkeypatch: pytest.MonkeyPatch, debugger: list[str]
) -> None:
    asked = []
    monkeypatch.setattr(ReaperClient, "spawn", lambda _, *request: asked.append(request))
    with guarded() as reaper:
        assert debugger == []  # so it has not seen the reaper
        start_workers(reaper, COMMANDS, ENV)
    ((commands, env, _),) = asked
    assert "pydevd.py" in commands[0].argv
    assert env == ENV


def test_a_tool_that_fails_costs_no_worker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object, **__: object) -> int:
        raise KeyError("state")

    monkeypatch.setattr(os, "posix_spawn", fails)
    with caplog.at_level(logging.WARNING, "rallypoint"):
        assert as_patched(COMMANDS[:1], ENV)[0][0].argv == COMMANDS[0].argv
    assert caplog.messages == [
        "'python' starts without the debugger or tracer of this process, which fails with KeyError: 'state'"
    ]


@pytest.mark.parametrize(
    ("module", "name", "replacement", "why"),
    [
        (os, "posix_spawn", lambda *_: 0, "its os.posix_spawn does not call Python's"),
        (subprocess, "Popen", types.SimpleNamespace, "its subprocess.Popen is not derived from Python's"),
    ],
)
def test_what_starts_processes_in_its_own_way_is_not_asked(
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
    assert why in caplog.text


def test_gevent_in_the_launcher_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkey = types.ModuleType("gevent.monkey")
    monkeypatch.setattr(monkey, "is_module_patched", {"threading", "select"}.__contains__, raising=False)
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    monkeypatch.setattr("rallypoint.base.kernel._checked", False)
    with pytest.raises(UserError, match=r"^gevent has replaced threading, select in this process"):
        check_kernel()
    monkeypatch.setattr(monkey, "is_module_patched", lambda _: False)
    check_kernel()
