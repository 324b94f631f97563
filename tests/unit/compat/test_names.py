"""Names of torch's modules, on a machine without torch."""

from __future__ import annotations

import sys

import pytest

from rallypoint.compat import names
from tests.processes import completed

ASKS = """
import sys
sys.modules["torch"] = None  # as good as not installed
from importlib import import_module
from rallypoint.compat import names
for path in names.MODULES:
    import_module(f"rallypoint.compat.{path}")
for home, held in names.HOMES.items():
    module = import_module(home)
    for name in held.split():
        getattr(module, name)
for path, name in names.ELSEWHERE:
    getattr(import_module(f"rallypoint.compat.{path}"), name)
from rallypoint.compat.elastic import timer
from rallypoint.compat.elastic.agent.server.api import record
from rallypoint.compat import handlers, launch, run, shim
from rallypoint.compat.launcher import LaunchConfig
from rallypoint.compat.run import macros
import rallypoint.observe.telemetry.handlers, rallypoint.workers.timers
assert record is rallypoint.observe.telemetry.handlers.record
assert timer.configure is rallypoint.workers.timers.configure
assert not hasattr(timer, "__wrapped__")
TORCHS
"""


def asks(line: str) -> str:
    done = completed([sys.executable, "-c", ASKS.replace("TORCHS", line)])
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.process
def test_all_that_is_ours_is_there() -> None:
    assert asks("") == ""


@pytest.mark.process
@pytest.mark.parametrize(
    "line",
    [
        "from rallypoint.compat.elastic.multiprocessing.tail_log import TailLog",
        "from rallypoint.compat.elastic.timer import debug_info",
        "from rallypoint.compat.elastic.events import *",
        "from rallypoint.compat import all_reduce",
    ],
)
def test_a_name_of_torchs_says_what_is_missing(line: str) -> None:
    said = asks(line)
    assert said.startswith("ImportError: ")
    assert "install torch" in said


def test_a_name_has_one_home() -> None:
    listed = [name for held in names.HOMES.values() for name in held.split()]
    assert len(listed) == len(set(listed))
